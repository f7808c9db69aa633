"""Matmuls with a collective beside them, in one piece and in chunks: from costs to a timeline.

A *gather* operator collects its input from all ranks and multiplies it; a *scatter* operator multiplies and sums the
products over the ranks, of which each keeps its part. Neither collective can hide under another operator: what comes
next needs its result. In k chunks, chunk i is multiplied while chunk i + 1 arrives or chunk i − 1 leaves, so that with
tc of compute and tm of transfer an operator takes max(tc, tm) + min(tc, tm)/k, and k latencies. (The decomposition of
Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", 2023.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from course_lib.link_cost import LinkCost
from course_lib.timeline import Span, Timeline


@dataclass(frozen=True)
class Operator:
    """`compute_s` seconds of matmul beside one collective of `bytes` bytes, the whole tensor of all ranks.

    `spare_s` is compute that nobody waits for, the gradient of a weight: it comes after the last chunk has left.
    Raises `ValueError` for another kind, or for a negative time or size."""

    kind: Literal["gather", "scatter"]
    compute_s: float
    bytes: float
    link: LinkCost
    spare_s: float = 0.0
    collective: str = ""
    name: str = "matmul"

    def __post_init__(self) -> None:
        if self.kind not in ("gather", "scatter"):
            raise ValueError(f"kind={self.kind!r}: an operator gathers before its matmul or scatters after it")
        if min(self.compute_s, self.bytes, self.spare_s) < 0:
            raise ValueError(f"compute_s={self.compute_s}, bytes={self.bytes}, spare_s={self.spare_s}: give 0 or more")

    @property
    def hideable_s(self) -> float:
        """What an operator can hide at the most: the shorter of its compute and its collective in one piece."""
        return min(self.compute_s + self.spare_s, self.link.cost(self.bytes))


def predict_chunked(operators: Iterable[Operator], chunks: int | None) -> Timeline:
    """One pass over operators, each needing the result of the one before, as spans of rank 0 and step 0.

    `chunks=None` waits for every collective and overlaps nothing. Raises `ValueError` for less than one chunk."""
    if chunks is not None and chunks < 1:
        raise ValueError(f"chunks={chunks}: give at least 1, or None to wait for every collective")
    spans: list[Span] = []
    now = 0.0
    for operator in operators:
        now = _blocking(spans, operator, now) if chunks is None else _operator(spans, operator, chunks, now)
    spans.append(Span(0, "step", "step", "step 0", 0, _ns(now), -1, -1, 0))
    return Timeline.of(spans, "simulated")


def step_s(timeline: Timeline) -> float:
    """Seconds of the pass."""
    return sum(s.stop - s.start for s in timeline.select(kind="step")) / 1e9


def _blocking(spans: list[Span], one: Operator, now: float) -> float:
    whole = one.compute_s + one.spare_s
    if one.kind == "gather":
        return _compute(spans, one, whole, _travel(spans, one, 1, now))
    return _travel(spans, one, 1, _compute(spans, one, whole, now))


def _operator(spans: list[Span], one: Operator, chunks: int, now: float) -> float:
    part = one.compute_s / chunks
    if one.kind == "gather":
        here = _travel(spans, one, chunks, now)
        for i in range(chunks):
            start = max(now, here)  # its chunk has arrived; the next one sets out, if the wire is free
            if i + 1 < chunks:
                here = _travel(spans, one, chunks, max(start if i else now, here))
            now = _compute(spans, one, part, start)
        return _compute(spans, one, one.spare_s, now)
    gone = now
    for _ in range(chunks):
        now = _compute(spans, one, part, now)
        gone = _travel(spans, one, chunks, max(now, gone))
    return max(_compute(spans, one, one.spare_s, now), gone)


def _compute(spans: list[Span], one: Operator, seconds: float, start: float) -> float:
    return _add(spans, "compute", "device", one.name, start, seconds) if seconds else start


def _travel(spans: list[Span], one: Operator, chunks: int, start: float) -> float:
    size = one.bytes / chunks
    name = one.collective or {"gather": "all_gather", "scatter": "reduce_scatter"}[one.kind]
    return _add(spans, "comm", "wire", name, start, one.link.cost(size), round(size))


def _add(spans: list[Span], kind: str, lane: str, name: str, start: float, seconds: float, size: int = -1) -> float:
    spans.append(Span(0, kind, lane, name, _ns(start), _ns(start + seconds), size, -1, 0))
    return start + seconds


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def hideable_s(operators: Sequence[Operator]) -> float:
    """What chunks can hide at the most, over all operators: none of it hides under another operator."""
    return sum(one.hideable_s for one in operators)
