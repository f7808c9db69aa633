"""Three review figures for the end of every lab and every trace: communication share, busy curve, step times.

They are the questions to ask of any run: how much of the step is communication, and how much of that
is exposed? What does the device do while time passes? Are the steps alike?
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import numpy as np

from course_lib.overlap import Report, Row, report
from course_lib.show.frame import MARGIN
from course_lib.show.scene import typical_step
from course_lib.show.style import LOOKS, Theme, theme
from course_lib.show.words import percent
from course_lib.timeline import Timeline, intersect, length, union

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from course_lib.show.picture import Picture

SHARE_LINE = 0.30
"""Above this share of exposed communication there is something to gain: not enough overlap."""
_BINS = 60
_TOP, _GAP, _HEIGHT = 46, 44, 225


def review(timeline: Timeline, *, found: Report | None = None, title: str | None = None, dark: bool = False,
           width_px: int = 700) -> Picture:
    """Draw the three figures of a measured timeline, all ranks pooled.

    Left: hidden and exposed communication as a share of each step. Middle: how busy an average rank is
    in the course of the step of median time, compute alone and with communication (what a utilisation
    counter shows: a waiting collective counts as busy). Right: the time of every step with its
    coefficient of variation. `found` are the numbers to show (default: those of `overlap.report`). Raises
    `ValueError` when the timeline has no steps.
    """
    from course_lib.show.picture import Picture

    found = found or report(timeline)
    if not timeline.steps:
        raise ValueError("nothing to review: the timeline has no step spans (record with measure_step())")
    look = theme(dark)
    top = MARGIN + (24 if title else 0)
    picture = Picture(width_px, _HEIGHT + top, look, sentence(found))
    if title:
        picture.text_px(MARGIN, MARGIN, title, 15, weight="bold")
    width = (width_px - 2 * MARGIN - 2 * _GAP - 30) / 3
    for column, draw in enumerate((_shares, _busy, _variation)):
        left = MARGIN + 30 + column * (width + _GAP)
        axes = picture.axes_px(left, top + _TOP, width, _HEIGHT - _TOP - 62)
        _plain(axes, look)
        head, value = draw(axes, timeline, found, look)
        picture.text_px(left - 24, top, head, 11, color=look.muted)
        picture.text_px(left - 24, top + 14, value, 18, weight="bold")
    picture.text_px(MARGIN, _HEIGHT + top - MARGIN - 4, timeline.provenance, 10, color=look.muted, label="provenance")
    return picture


def sentence(found: Report) -> str:
    """The three figures in words."""
    pooled, parts = found.pooled, []
    parts.append("communication share unknown" if pooled.share is None else
                 f"communication {pooled.share:.0%} of the step" +
                 ("" if pooled.exposed is None else f", exposed {pooled.exposed / pooled.span:.0%}"))
    parts.append("compute unknown" if pooled.compute_busy is None else f"compute busy {pooled.compute_busy:.0%}")
    parts.append("one step only" if found.variation is None else f"step time varies by {found.variation:.1%}")
    return "Review: " + "; ".join(parts) + "."


def _shares(axes: Axes, _timeline: Timeline, found: Report, look: Theme) -> tuple[str, str]:
    each: dict[int, list[Row]] = {row.step: [] for row in found.rows}
    for row in found.rows:
        if row.comm is not None and row.span:
            each[row.step].append(row)
    steps = sorted(each)
    hidden, total = ([statistics.fmean((getattr(r, part) or 0) / r.span for r in each[step]) if each[step] else 0.0
                      for step in steps] for part in ("hidden", "comm"))
    _bars(axes, hidden, [0.0] * len(steps), facecolor=LOOKS["hidden"].fill)
    _bars(axes, total, hidden, facecolor=LOOKS["exposed"].fill, hatch=LOOKS["exposed"].hatch, edgecolor=look.paper)
    axes.axhline(SHARE_LINE, color=look.ink, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_ylim(0, 1)
    axes.set_yticks([0, SHARE_LINE, 1], ["0", "30 %", "100 %"])
    _numbered(axes, steps, look)
    pooled = found.pooled
    return "exposed communication", "unknown" if pooled.exposed is None and pooled.comm != 0 else \
        percent((pooled.exposed or 0) / pooled.span)


def _bars(axes: Axes, tops: list[float], bottoms: list[float], **looks: str) -> None:
    """A bar at each of 0, 1, 2, …, all of them one patch: a run may have thousands of steps."""
    edges = [x + side for x in range(len(tops)) for side in (-0.4, 0.4)]
    apart = [[part for value in values for part in (value, np.nan)][:-1] for values in (tops, bottoms)]
    axes.stairs(apart[0], edges, baseline=apart[1], fill=True, linewidth=0, **looks)


def _busy(axes: Axes, timeline: Timeline, found: Report, look: Theme) -> tuple[str, str]:
    step = typical_step(found)
    inside = timeline.select(step=step)
    windows = {s.rank: (s.start, s.stop) for s in inside if s.kind == "step"}
    longest = max(stop - start for start, stop in windows.values())
    edges = np.linspace(0, longest, _BINS + 1).astype(np.int64)
    total = np.zeros((2, _BINS))
    for rank, (start, _) in windows.items():
        spans = inside.select(rank=rank)
        compute, work = (union(np.array([(s.start - start, s.stop - start) for s in spans if s.kind in kinds],
                                        np.int64).reshape(-1, 2)) for kinds in (("compute",),
                                                                               ("compute", "comm", "copy")))
        for i in range(_BINS):
            cell = edges[None, i:i + 2]
            total[:, i] += [length(intersect(cover, cell)) for cover in (compute, work)]
    share = total / (len(windows) * np.diff(edges))
    at = edges / 1e6
    axes.stairs(share[1], at, fill=True, color=look.grid, label="compute or communication")
    axes.stairs(share[0], at, fill=True, color=LOOKS["compute"].fill, label="compute")
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 1], ["0", "100 %"])
    axes.set_xlim(0, longest / 1e6)
    axes.set_xlabel("ms into the step; grey: only sending", fontsize=7.5, color=look.muted, labelpad=2)
    busy = found.pooled.compute_busy
    return "compute busy", percent(busy)


def _variation(axes: Axes, _timeline: Timeline, found: Report, look: Theme) -> tuple[str, str]:
    times = np.array(found.step_times) / 1e6
    axes.plot(range(len(times)), times, "o-", color=look.ink, linewidth=1, markersize=4)
    axes.set_ylim(0, max(times) * 1.15)
    _numbered(axes, sorted({row.step for row in found.rows}), look)
    axes.set_ylabel("ms", fontsize=8, color=look.muted, labelpad=1)
    return "step time varies by", "one step" if found.variation is None else f"{found.variation * 100:.1f} %"


def _numbered(axes: Axes, steps: list[int], look: Theme) -> None:
    axes.set_xlim(-0.6, len(steps) - 0.4)
    some = range(0, len(steps), max(1, len(steps) // 6))
    axes.set_xticks(list(some), [str(steps[i]) for i in some])
    axes.set_xlabel("step", fontsize=7.5, color=look.muted, labelpad=2)


def _plain(axes: Axes, look: Theme) -> None:
    axes.set_facecolor("none")
    axes.tick_params(colors=look.muted, labelsize=7.5, length=2, width=0.8)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(look.grid)
