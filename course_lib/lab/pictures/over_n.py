"""One picture for windows of several lengths: exposed milliseconds beside their share of the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from course_lib.lab.errors import LabError

if TYPE_CHECKING:
    from course_lib.show.picture import Picture

Values = Mapping[int, tuple[float, float]]
"""By N: exposed milliseconds of an update, and the same as a part of the step (0 to 1)."""

WIDTH, HEIGHT, LEFT, TOP, GAP = 700, 250, 46, 50, 66


def over_n(predicted: Values, measured: Values, *, provenance: str = "", dark: bool = False) -> Picture:
    """Predicted lines and measured points over N, from 0: exposed milliseconds on the left, their share on the right.

    Raises `LabError` when nothing was measured.
    """
    from course_lib.show.picture import Picture
    from course_lib.show.style import LOOKS, theme

    if not measured:
        raise LabError("over_n: nothing was measured; give {N: (exposed ms, share)}")
    look, colour = theme(dark), LOOKS["exposed"].fill
    said = "; ".join(f"N = {N}: {ms:.1f} ms exposed, {share:.0%} of the step" for N, (ms, share) in measured.items())
    picture = Picture(WIDTH, HEIGHT, look, f"Exposed communication over N. Measured: {said}.")
    width = (WIDTH - 2 * LEFT - GAP) / 2
    for k, (title, scale) in enumerate((("exposed milliseconds of an update", 1), ("their share of the step, %", 100))):
        left = LEFT + k * (width + GAP)
        axes = picture.axes_px(left, TOP, width, HEIGHT - TOP - 66)
        picture.text_px(left - 32, 18, title, 13, weight="bold")
        line = [(N, values[k] * scale) for N, values in sorted(predicted.items())]
        dots = [(N, values[k] * scale) for N, values in sorted(measured.items())]
        if line:
            axes.plot(*zip(*line), color=look.ink, linewidth=1.3, label="predicted")
        axes.plot(*zip(*dots), "o", color=colour, markersize=7, markeredgecolor=look.paper, label="measured")
        axes.set_ylim(0, max(y for _, y in (*line, *dots)) * 1.25)
        axes.set_xticks(sorted(measured))
        axes.set_xlabel("micro-steps N", fontsize=8, color=look.muted, labelpad=2)
        axes.set_facecolor("none")
        axes.tick_params(colors=look.muted, labelsize=8, length=3, width=0.8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(look.grid)
    picture.text_px(14, HEIGHT - 24, f"line: predicted  ·  points: {provenance or 'measured'}", 10, color=look.muted)
    return picture
