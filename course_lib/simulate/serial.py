"""Blocking baselines: what an update takes when nothing overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from course_lib.link_cost import LinkCost
from course_lib.timeline import Span, Timeline


class SerialPrediction(NamedTuple):
    """One update: how many collectives, how many bytes were handed to them, seconds, exposed seconds, and the
    same as spans (rank 0, step 0, provenance `simulated`)."""

    collectives: int
    bytes: int
    step_s: float
    exposed_s: float
    timeline: Timeline


def predict_serial(sizes_bytes: Sequence[int], link: LinkCost, Tf: float, Tb: float, N: int = 1, *, flat: bool = True,
                   every: bool = True) -> SerialPrediction:
    """N micro-steps of Tf + Tb seconds and blocking all-reduces of the gradient: after `every` micro-step or once at
    the end, `flat` in one collective or one for each of `sizes_bytes`. All communication is exposed.

    Raises `ValueError` without gradients, for an N below 1 or a negative time."""
    if not sizes_bytes or min(sizes_bytes) <= 0:
        raise ValueError(f"sizes {list(sizes_bytes)}: give the bytes of at least one gradient, each above 0")
    if N < 1 or Tf < 0 or Tb < 0:
        raise ValueError(f"N={N}, Tf={Tf}, Tb={Tb}: an update has at least one micro-step, and times are 0 or more")
    parts = [sum(sizes_bytes)] if flat else list(sizes_bytes)
    spans, now, exposed, sent = [], 0.0, 0.0, 0

    def add(kind: str, lane: str, name: str, seconds: float, size: int = -1) -> None:
        nonlocal now
        spans.append(Span(0, kind, lane, name, round(now * 1e9), round((now + seconds) * 1e9), size, -1, 0))
        now += seconds

    for k in range(N):
        add("compute", "device", f"forward {k}", Tf)
        add("compute", "device", f"backward {k}", Tb)
        for size in parts if every or k == N - 1 else ():
            exposed, sent = exposed + link.cost(size), sent + size
            add("comm", "wire", "all_reduce", link.cost(size), size)
    spans.append(Span(0, "step", "step", "step 0", 0, round(now * 1e9), -1, -1, 0))
    return SerialPrediction(len(parts) * (N if every else 1), sent, now, exposed, Timeline.of(spans, "simulated"))
