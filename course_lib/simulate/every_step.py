"""Sending in every micro-step, or once: the same wire, predicted side by side.

Micro-step k's buckets queue behind those of micro-step k−1. With C = Σ c(Sᵢ), the wire's time for one micro-step,
and f the finish of the last bucket on a wire that is free when backward starts, the traffic of micro-step k ends at

    eₖ = max(sₖ + f, eₖ₋₁ + C)        sₖ: when its backward starts

The last backward starts no earlier than with `no_sync`, and e ≥ s + f, so sending in every micro-step is never
shorter. It ties when the wire is free again early enough: e − s + C ≤ max(f, Tb) in the last micro-step, which holds
if earlier traffic has drained before the last micro-step's first bucket is ready. Otherwise it is longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from course_lib.link_cost import LinkCost
from course_lib.simulate.buckets import BucketPlan, GradientProfile, launches, predict
from course_lib.timeline import Span, Timeline


class EveryStepPrediction(NamedTuple):
    """One update that sends every micro-step's buckets. Seconds; `loss_s` is what it takes longer than sending the
    last micro-step's only, `bytes` is handed to collectives, `buffer_bytes` is what the gradient's two sets of buckets
    take (one set does for `no_sync`). Spans are of rank 0 and step 0, provenance `simulated`."""

    step_s: float
    exposed_s: float
    loss_s: float
    bytes: int
    buffer_bytes: int
    timeline: Timeline


def predict_every_step(profile: GradientProfile, link: LinkCost, plan: BucketPlan) -> EveryStepPrediction:
    """`profile.N` micro-steps with `train.EveryStep`: buckets leave as in `predict`, in every micro-step, and a
    micro-step begins when the one before it has computed and the one before that has arrived (two sets of buckets).
    Raises `ValueError` if the plan is not the profile's."""
    spans, arrived, wire, free = [], [0.0, 0.0], 0.0, 0.0
    for k in range(profile.N):
        start = max(free, arrived[k % 2])
        spans += _compute(profile, k, start)
        backward = start + profile.Tf
        for i, ((first, full, launched), size) in enumerate(zip(launches(profile, plan), plan.bytes)):
            begin = max(wire, backward + launched)
            wire = begin + link.cost(size)
            spans += [_span("fill", "bucket", f"bucket {i}", backward + first, backward + full, size, i),
                      _span("queue", "wire", f"bucket {i}", backward + launched, begin, size, i),
                      _span("comm", "wire", "all_reduce", begin, wire, size, i)]
        arrived[k % 2], free = wire, backward + profile.Tb
    step_s = max(free, wire) + profile.To
    if profile.To:
        spans.append(_span("compute", "device", "optimizer", step_s - profile.To, step_s))
    spans.append(_span("step", "step", "step 0", 0.0, step_s))
    once_s = predict(profile, link, plan).step_s
    return EveryStepPrediction(step_s, step_s - profile.Tc, step_s - once_s, profile.N * profile.total_bytes,
                               2 * profile.total_bytes, Timeline.of(spans, "simulated"))


def _compute(profile: GradientProfile, k: int, start: float) -> Iterator[Span]:
    yield _span("compute", "device", f"forward {k}", start, start + profile.Tf)
    yield _span("compute", "device", f"backward {k}", start + profile.Tf, start + profile.Tf + profile.Tb)


def _span(kind: str, lane: str, name: str, start: float, stop: float, size: int = -1, bucket: int = -1) -> Span:
    return Span(0, kind, lane, name, round(start * 1e9), round(stop * 1e9), size, bucket, 0)


def predict_ddp_every_step(profile: GradientProfile, link: LinkCost, plan: BucketPlan) -> float:
    """The same buckets under stock DDP without `no_sync`: it waits for them at the end of every backward, so the tail
    of every micro-step is exposed. Seconds."""
    tail = predict(profile, link, plan).exposed_s
    return profile.Tc + profile.N * tail
