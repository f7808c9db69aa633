"""All-reduces as the messages they are made of: what the first rank receives, inside its node or from another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from course_lib.lab.errors import LabError

if TYPE_CHECKING:
    from course_lib.show.picture import Picture
    from course_lib.simulate.collectives import Nodes
    from course_lib.timeline import Timeline

WIDTH, LEFT, RIGHT, TOP, BELOW, LANE, GAP = 700, 20, 14, 40, 78, 18, 26
INK = {False: "#999999", True: "#CC79A7"}
"""By whether a message crosses. Colours that mean nothing else here: without compute, nothing is hidden or exposed."""


class Hop(NamedTuple):
    """A message that the first rank waits for and receives: seconds from the start, and whether it crosses nodes."""

    start: float
    stop: float
    between: bool


def flat_hops(nodes: Nodes, nbytes: float) -> list[Hop]:
    """The flat ring by the α-β model. The first rank's left neighbour is on the last node, so that all its messages
    cross; every hop is as slow as its slowest message."""
    from course_lib.simulate.collectives import flat_ring

    count = 2 * (nodes.size - 1)
    each = flat_ring(nodes).cost(nbytes) / max(1, count)
    return [Hop(k * each, (k + 1) * each, nodes.count > 1) for k in range(count)]


def two_level_hops(nodes: Nodes, nbytes: float) -> list[Hop]:
    """Reduce-scatter inside, all-reduce between, all-gather inside, by the α-β model."""
    from course_lib.simulate.collectives import hierarchical, ring

    inside = ring(nodes.ranks, nodes.inner).cost(nbytes) / 2
    between = hierarchical(nodes).cost(nbytes) - 2 * inside
    steps = [(nodes.ranks - 1, inside, False), (2 * (nodes.count - 1), between, True), (nodes.ranks - 1, inside, False)]
    hops, now = [], 0.0
    for count, seconds, crosses in steps:
        for _ in range(count):
            hops.append(Hop(now, now := now + seconds / count, crosses))
    return hops


def measured_hops(timeline: Timeline) -> list[Hop]:
    """The receives of rank 0 in its step of median time. A receive begins when it is the next to come."""
    from course_lib.lab.workbench.wires import BETWEEN

    steps = sorted(timeline.select(rank=0, kind="step"), key=lambda s: s.stop - s.start)
    step = steps[len(steps) // 2]
    spans = [s for s in timeline.select(rank=0, kind="comm", step=step.step) if s.name == "recv"]
    return [Hop((s.start - step.start) / 1e9, (s.stop - step.start) / 1e9, s.bucket == BETWEEN) for s in spans]


def hops(predicted: Mapping[str, Sequence[Hop]], measured: Mapping[str, Sequence[Hop]] | None = None, *,
         provenance: str = "simulated", dark: bool = False) -> Picture:
    """One axis for all of them: outlines are predicted, bars below measured. Raises `LabError` without any."""
    from matplotlib.patches import Patch

    from course_lib.show.picture import Picture
    from course_lib.show.style import theme

    if not predicted:
        raise LabError("hops: give at least one all-reduce, {name: hops}")
    measured, look = measured or {}, theme(dark)
    body = sum(GAP + LANE + 3 + (LANE + 3) * (name in measured) for name in predicted)
    ends = {name: (rows[-1].stop, measured[name][-1].stop if measured.get(name) else None)
            for name, rows in predicted.items()}  # fmt: skip
    said = {name: f"predicted {p * 1e3:.3g} ms" + (f", measured {m * 1e3:.3g} ms" if m else "")
            for name, (p, m) in ends.items()}  # fmt: skip
    picture = Picture(WIDTH, TOP + body + BELOW, look, "; ".join(f"{name}: {text}" for name, text in said.items()))
    axes = picture.axes_px(LEFT, TOP, WIDTH - LEFT - RIGHT, body)
    axes.set_xlim(0, 1e3 * max(max(p, m or 0) for p, m in ends.values()) * 1.01)
    axes.set_ylim(body, 0)
    top = 0
    for name, rows in predicted.items():
        picture.text_px(LEFT, TOP + top + 8, name, 12, weight="bold")
        picture.text_px(WIDTH - RIGHT, TOP + top + 9, said[name], 11, ha="right", color=look.muted)
        top += GAP
        for hop in rows:
            _bar(axes, hop, top, look, filled=False)
        top += LANE + 3
        if name in measured:
            for hop in measured[name]:
                _bar(axes, hop, top, look, filled=True)
            top += LANE + 3
    axes.set_facecolor("none")
    axes.set_yticks([])
    axes.tick_params(axis="x", colors=look.muted, labelsize=8, length=3, width=0.8)
    axes.set_xlabel("milliseconds since the all-reduce began", fontsize=8, color=look.muted, labelpad=2)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(look.grid)
    keys = [Patch(facecolor=INK[False], edgecolor=look.paper, label="from a rank of its own node"),
            Patch(facecolor=INK[True], edgecolor=look.paper, hatch="////", label="from another node")]
    keys += [Patch(facecolor="none", edgecolor=look.ink, label="predicted")]
    across, down = picture.pixels
    picture.legend(handles=keys, loc="upper left", bbox_to_anchor=(LEFT / across, 36 / down), ncols=3, frameon=False,
                   fontsize=7.6, labelcolor=look.ink, borderpad=0, borderaxespad=0)
    picture.text_px(LEFT, 12, "What rank 0 receives, message by message", 13, weight="bold")
    picture.text_px(LEFT, down - 14, provenance, 10, color=look.muted)
    return picture


def _bar(axes, hop: Hop, top: float, look, filled: bool) -> None:
    span = [(1e3 * hop.start, 1e3 * (hop.stop - hop.start))]
    if filled:
        axes.broken_barh(span, (top, LANE), facecolors=INK[hop.between], edgecolors=look.paper, linewidth=0.8,
                         hatch="////" if hop.between else None)
    else:
        axes.broken_barh(span, (top, LANE), facecolors="none", edgecolors=INK[hop.between], linewidth=1.2)
