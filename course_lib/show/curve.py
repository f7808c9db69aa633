"""`curve(...)`: step time against bucket size, the prediction as a line and measurements as points on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from course_lib.show.style import BEST, theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from course_lib.show.picture import Picture

MARGIN, LEFT, RIGHT, BOTTOM = 14, 62, 132, 88


class Point(NamedTuple):
    """A measured bucket size: MB of 2**20 bytes, and milliseconds: median, lower and upper quartile."""

    size_mb: float
    median_ms: float
    low_ms: float
    high_ms: float


class Level(NamedTuple):
    """A horizontal line with its name beside it."""

    name: str
    ms: float
    colour: str
    dash: tuple


def curve(predicted: Sequence[tuple[float, float]], measured: Iterable[Sequence[float]] = (), *,
          best_ms: float | None = None, best_label: str = "best plan", limit_ms: float | None = None,
          serial_ms: float | None = None, title: str | None = None, provenance: str = "", dark: bool = False,
          width_px: int = 700, height_px: int = 360) -> Figure:
    """Step time over bucket size. `predicted` holds (MB, ms) pairs, `measured` `Point`s (or plain
    (MB, median, low, high) in ms; low and high may be left out). `best_ms`, `limit_ms` and `serial_ms`
    are drawn as levels. Raises `ValueError` when there is nothing to draw or a size is not positive.
    """
    from course_lib.show.picture import Picture, points

    line = sorted((float(mb), float(ms)) for mb, ms in predicted)
    dots = sorted(point(p) for p in measured)
    if not line and not dots:
        raise ValueError("nothing to draw: give predicted (MB, ms) pairs or measured points")
    if any(row[0] <= 0 for row in (*line, *dots)):
        raise ValueError("bucket sizes must be above 0 MB: the axis is logarithmic")
    look = theme(dark)
    head = MARGIN + (26 if title else 0) + 16
    picture = Picture(width_px, height_px, look, _words(line, dots, best_ms))
    axes = picture.axes_px(LEFT, head, width_px - LEFT - RIGHT, height_px - head - BOTTOM)
    if title:
        picture.text_px(MARGIN, MARGIN, title, 15, weight="bold")
    picture.text_px(MARGIN, head - 17, "step time, ms", 11, color=look.muted)
    _prepare(axes, [row[0] for row in (*line, *dots)], look)
    if line:
        axes.plot(*zip(*line), color=look.ink, linewidth=1.5, zorder=3, label="predicted")
    if dots:
        axes.errorbar([p.size_mb for p in dots], [p.median_ms for p in dots],
                      yerr=[[p.median_ms - p.low_ms for p in dots], [p.high_ms - p.median_ms for p in dots]],
                      fmt="o", color=look.ink, markersize=points(8), markeredgecolor=look.paper, elinewidth=1.4,
                      capsize=3, zorder=4, label="measured")
    levels = [Level("serial", serial_ms, look.muted, (0, (1, 2))), Level(best_label, best_ms, BEST, (0, ())),
              Level("physical limit", limit_ms, look.ink, (0, (4, 3)))]
    _levels(picture, axes, [level for level in levels if level.ms is not None], head)
    axes.legend(loc="lower left", bbox_to_anchor=(0, -0.01), bbox_transform=_bottom(picture), ncols=2, frameon=False,
                fontsize=7.6, labelcolor=look.ink, borderaxespad=0)
    picture.text_px(MARGIN, height_px - MARGIN - 8, provenance, 10, color=look.muted, label="provenance")
    return picture


def point(row: Sequence[float]) -> Point:
    """(MB, median) or (MB, median, low, high) as a `Point`."""
    size, median, *spread = map(float, row)
    return Point(size, median, *(spread or (median, median)))


def _words(line: list, dots: list[Point], best_ms: float | None) -> str:
    parts = []
    if line:
        size, ms = min(line, key=lambda row: row[1])
        parts.append(f"the best predicted bucket size is {size:g} MB with a step of {ms:.1f} ms")
    if dots:
        least = min(dots, key=lambda p: p.median_ms)
        parts.append(f"the best measured one is {least.size_mb:g} MB with {least.median_ms:.1f} ms")
    if best_ms is not None:
        parts.append(f"the best plan needs {best_ms:.1f} ms")
    return "Step time over bucket size: " + "; ".join(parts) + "."


def _prepare(axes: Axes, sizes: list[float], look) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xlim(min(sizes) / 1.15, max(sizes) * 1.15)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda mb, _: f"{mb:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_facecolor("none")
    axes.grid(axis="y", color=look.grid, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=look.muted, labelsize=8, length=3, width=0.8)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("bucket size, MB of 2²⁰ bytes", fontsize=8, color=look.muted, labelpad=2)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(look.grid)


def _levels(picture: Picture, axes: Axes, levels: list[Level], head: float) -> None:
    """Lines across the plot, their names in the right margin, moved apart where they would touch."""
    for level in levels:
        axes.axhline(level.ms, color=level.colour, linewidth=1.5, linestyle=level.dash, zorder=2,
                     label=f"_{level.name}")
    bottom, top = axes.get_ylim()
    height = axes.get_position().height * picture.pixels[1]
    free = -1e9
    for level in sorted(levels, key=lambda each: -each.ms):
        at = max((top - level.ms) / (top - bottom) * height, free)
        picture.text_px(picture.pixels[0] - RIGHT + 8, head + at, f"{level.name}\n{level.ms:.1f} ms", 10, va="center",
                        linespacing=1.25)
        free = at + 30


def _bottom(picture: Picture):
    """Figure coordinates with the origin at the legend's corner."""
    from matplotlib.transforms import Affine2D

    across, down = picture.pixels
    return Affine2D().translate(LEFT / across, (MARGIN + 16) / down) + picture.transFigure
