"""`lanes(timeline)`: a step as trace viewers draw it, every bar in the colour of its lane, and no verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from course_lib.show.scene import scene
from course_lib.show.style import LOOKS, theme
from course_lib.timeline import Timeline

if TYPE_CHECKING:
    from course_lib.show.picture import Picture

LEFT, MARGIN, HEAD, LANE, BETWEEN, FOOT = 124, 14, 44, 24, 12, 66


def lanes(timeline: Timeline, *, step: int | None = None, title: str = "", dark: bool = False,
          width_px: int = 700) -> Picture:
    """Draw a compute and a wire lane per rank without saying what is hidden: for those who want to judge by eye.

    `step` defaults to the one of median time. Raises `ValueError` when there is nothing to draw or no such step.
    """
    from course_lib.show.picture import Picture

    shown = scene(timeline, step)
    if not shown.rows:
        raise ValueError("nothing to draw: the timeline has no compute, copy or communication spans")
    look, count = theme(dark), len(shown.rows)
    body = count * LANE + (count // 2 - 1) * BETWEEN
    words = f"A step of {count // 2} ranks as a trace viewer shows it: compute and wire, without a verdict."
    picture = Picture(width_px, HEAD + body + FOOT, look, words)
    picture.text_px(MARGIN, MARGIN, title, 15, weight="bold")
    axes = picture.axes_px(LEFT, HEAD, width_px - LEFT - MARGIN, body)
    axes.set_xlim(0, shown.step_ns / 1e6 * 1.005)
    axes.set_ylim(body, 0)
    axes.set_yticks([])
    axes.set_facecolor("none")
    axes.tick_params(axis="x", colors=look.muted, labelsize=8, length=3, width=0.8)
    axes.set_xlabel("milliseconds since the step began", fontsize=8, color=look.muted, labelpad=2)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(look.grid)
    for k, row in enumerate(shown.rows):
        top = k * LANE + k // 2 * BETWEEN
        fill = LOOKS["compute" if row.role == "compute" else "copy"].fill
        bars = np.array([(bar.start, bar.stop - bar.start) for bar in row.bars]).reshape(-1, 2) / 1e6
        axes.broken_barh([(0, shown.step_ns / 1e6)], (top + 1, LANE - 2), facecolors=look.lane)
        axes.broken_barh(bars, (top + 1, LANE - 2), facecolors=fill, edgecolors=look.paper, linewidth=0.6)
        middle = HEAD + top + LANE / 2
        if row.role == "compute":
            picture.text_px(MARGIN, middle, f"rank {row.rank}", 11, va="center", weight="bold")
        picture.text_px(LEFT - 8, middle, row.role, 10, va="center", ha="right", color=look.muted)
    picture.text_px(MARGIN, HEAD + body + FOOT - MARGIN - 8, shown.provenance, 10, color=look.muted, label="provenance")
    return picture
