"""Two schedules of the same work on one time axis: a compute and a wire lane each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from course_lib.lab.errors import LabError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from course_lib.show.picture import Picture
    from course_lib.show.scene import Scene
    from course_lib.show.style import Theme
    from course_lib.timeline import Timeline

WIDTH, LEFT, TOP, LANE, GAP, BELOW = 700, 150, 16, 22, 34, 74


def side_by_side(timelines: Mapping[str, Timeline], *, dark: bool = False) -> Picture:
    """Rank 0's typical step of each timeline, in the colours of every picture here. The name, the step's
    milliseconds and its exposed milliseconds stand above each. Raises `LabError` without a timeline."""
    from course_lib.show.picture import Picture
    from course_lib.show.scene import scene
    from course_lib.show.style import theme

    if not timelines:
        raise LabError("side_by_side: give at least one timeline, {name: timeline}")
    look, scenes = theme(dark), {name: scene(one) for name, one in timelines.items()}
    body = height_px(len(scenes))
    words = "; ".join(f"{name}: {numbers(one)}" for name, one in scenes.items())
    picture = Picture(WIDTH, TOP + body + BELOW, look, words)
    draw_lanes(picture, scenes, TOP, look)
    provenance = next(iter(timelines.values())).provenance
    picture.text_px(14, picture.pixels[1] - 14, provenance, 10, color=look.muted)
    return picture


def height_px(scenes: int) -> int:
    """What the lanes of so many scenes take, without what stands below them."""
    return scenes * (GAP + 2 * (LANE + 3))


def numbers(one: Scene) -> str:
    """A step and what of it is exposed, in words."""
    return f"step {one.step_ns / 1e6:.1f} ms, exposed {(one.exposed_ns or 0) / 1e6:.1f} ms"


def draw_lanes(picture: Picture, scenes: Mapping[str, Scene], top_px: float, look: Theme) -> None:
    """The lanes of all scenes from `top_px` down, their time axis, and the legend 34 pixels above the picture's end."""
    from course_lib.show.style import LOOKS

    body = height_px(len(scenes))
    axes = picture.axes_px(LEFT, top_px, WIDTH - LEFT - 18, body)
    axes.set_xlim(0, max(one.step_ns for one in scenes.values()) / 1e6 * 1.005)
    axes.set_ylim(body, 0)
    top = 0.0
    for name, one in scenes.items():
        picture.text_px(14, top_px + top + 12, name, 12, weight="bold")
        beside = max(LEFT, 24 + 8 * len(name))  # a long name pushes them to the right
        picture.text_px(beside, top_px + top + 12, numbers(one), 11, color=look.muted)
        top += GAP
        for row in one.rows[:2]:
            axes.broken_barh([(0, row.stop / 1e6)], (top, LANE), facecolors=look.lane)
            for bar in row.bars:
                for piece in bar.pieces:
                    fill, _, hatch, _ = LOOKS[piece.look]
                    wait = piece.look == "wait"  # an outline: nothing moves there
                    axes.broken_barh([(piece.start / 1e6, (piece.stop - piece.start) / 1e6)],
                                     (top + wait, LANE - 2 * wait), facecolors="none" if wait else fill,
                                     edgecolors=fill if wait else look.paper, hatch=hatch or None,
                                     linewidth=1.7 if wait else 0)
                axes.broken_barh([(bar.start / 1e6, (bar.stop - bar.start) / 1e6)], (top, LANE), facecolors="none",
                                 edgecolors=look.paper, linewidth=0.5)
            picture.text_px(LEFT - 8, top_px + top + LANE / 2, row.role, 10, va="center", ha="right", color=look.muted)
            top += LANE + 3
    _finish(picture, axes, set().union(*(one.looks for one in scenes.values())), look)


def _finish(picture: Picture, axes: Axes, drawn: set[str], look: Theme) -> None:
    from matplotlib.patches import Patch

    from course_lib.show.style import LOOKS

    axes.set_facecolor("none")
    axes.set_yticks([])
    axes.tick_params(axis="x", colors=look.muted, labelsize=8, length=3, width=0.8)
    axes.set_xlabel("milliseconds since the step began", fontsize=8, color=look.muted, labelpad=2)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(look.grid)
    keys = [Patch(facecolor="none", edgecolor=fill, linewidth=1.7, label=label) if name == "wait" else
            Patch(facecolor=fill, edgecolor=look.paper, hatch=hatch * 2 or None, linewidth=0, label=label)
            for name, (fill, _, hatch, label) in LOOKS.items() if name in drawn]
    across, down = picture.pixels
    picture.legend(handles=keys, loc="upper left", bbox_to_anchor=(14 / across, 34 / down), ncols=len(keys),
                   frameon=False, fontsize=7.6, labelcolor=look.ink, borderpad=0, borderaxespad=0)
