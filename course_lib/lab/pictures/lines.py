"""One picture for what several schemes do over a common axis: `lines({"fp16": [(x, y), …]}, …)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.lab.errors import LabError

if TYPE_CHECKING:
    from course_lib.show.picture import Picture

Pairs = Sequence[tuple[float, float]]

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 700, 330, 56, 112, 56, 74
STYLES = (("#0072B2", (0, ()), "o"), ("#D55E00", (0, (5, 2)), "s"), ("#009E73", (0, (1, 1.5)), "^"),
          ("#CC79A7", (0, (6, 2, 1, 2)), "D"), ("#E69F00", (0, (3, 1)), "v"), ("#56B4E9", (0, (1, 1, 4, 1)), "P"))
"""Colour (Okabe–Ito), dash and marker: no line is known by its colour alone."""


def lines(drawn: Mapping[str, Pairs], measured: Mapping[str, Pairs] | None = None, *, x: str, y: str,
          title: str = "", log: str = "", at: float | None = None, level: tuple[str, float] | None = None,
          provenance: str = "", dark: bool = False) -> Picture:
    """A line for each of `drawn`, named at its end, and points of `measured` in the look of the line of their name.

    `log` holds the axes that are logarithmic ("x", "y", "xy"), `at` marks one x, `level` names one y. Raises
    `LabError` when there is nothing to draw.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    from course_lib.show.picture import Picture
    from course_lib.show.style import theme

    dots = measured or {}
    if not any(map(len, (*drawn.values(), *dots.values()))):
        raise LabError("lines: there is nothing to draw; give {name: [(x, y), …]}")
    look = theme(dark)
    ends = "; ".join(f"{name}: {row[-1][1]:.3g} at {row[-1][0]:.3g}" for name, row in drawn.items() if row)
    picture = Picture(WIDTH, HEIGHT, look, f"{title or y}. {y} over {x}. {ends}.")
    axes = picture.axes_px(LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM)
    picture.text_px(14, 12, title, 15, weight="bold")
    picture.text_px(14, TOP - 18, y, 11, color=look.muted)
    styles = dict(zip(dict.fromkeys((*drawn, *dots)), STYLES * 3))
    for name, (colour, dash, marker) in styles.items():
        if row := drawn.get(name):
            axes.plot(*zip(*row), color=colour, linestyle=dash, linewidth=1.8)
        if row := dots.get(name):
            axes.plot(*zip(*row), marker, color=colour, markersize=6, markeredgecolor=look.paper)
    if level:
        axes.axhline(level[1], color=look.muted, linewidth=1.1, linestyle=(0, (1, 2)))
    if at is not None:
        axes.axvline(at, color=look.muted, linewidth=1.1)
    for axis in log:
        getattr(axes, f"set_{axis}scale")("log")
        scale = getattr(axes, f"{axis}axis")
        scale.set_major_locator(LogLocator(subs=(1, 2, 5)))
        scale.set_major_formatter(lambda value, _: f"{value:g}")
        scale.set_minor_locator(NullLocator())
    if "y" not in log and not any(value < 0 for row in drawn.values() for _, value in row) and level is None:
        axes.set_ylim(bottom=min(0.9 * value for row in (*drawn.values(), *dots.values()) for _, value in row))
    axes.set_xlabel(x, fontsize=8, color=look.muted, labelpad=2)
    _plain(axes, look)
    _names(picture, axes, {n: ((drawn.get(n) or dots[n])[-1][1], styles[n][0]) for n in styles},
           {level[0]: (level[1], look.muted)} if level else {})
    kinds = [word for word, rows in (("lines: predicted", drawn), ("points: measured", dots)) if rows and dots]
    picture.text_px(14, HEIGHT - 22, "  ·  ".join(filter(None, [*kinds, provenance])), 10, color=look.muted)
    return picture


def _plain(axes: Any, look: Any) -> None:
    axes.set_facecolor("none")
    axes.grid(axis="y", color=look.grid, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=look.muted, labelsize=8, length=3, width=0.8, which="both", labelcolor=look.muted)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(look.grid)


def _names(picture: Picture, axes: Any, lines_: dict[str, tuple[float, str]], levels: dict) -> None:
    """The name of each line beside its end, moved down where two would touch."""
    free = -1e9
    spots = []
    for name, (value, colour) in (lines_ | levels).items():
        _, down = axes.transAxes.inverted().transform(axes.transData.transform((axes.get_xlim()[1], value)))
        spots.append((TOP + (1 - min(1.0, max(0.0, down))) * (HEIGHT - TOP - BOTTOM), name, colour))
    for top, name, colour in sorted(spots):
        free = max(top, free)
        picture.text_px(WIDTH - RIGHT + 6, free, name, 11, va="center", color=colour)
        free += 15
