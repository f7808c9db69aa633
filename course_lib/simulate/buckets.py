"""Gradient buckets on one FIFO wire: predict a step from one measured run, and find the best plan.

Bucket i starts when the wire is free and its last gradient is ready, and takes c(S) = a + β·S:
`f_i = max(f_{i-1}, r_i) + c(S_i)`. Everything here follows from that line.
Times are seconds relative to the start of the backward that communicates, bytes are bytes of
gradient, and MB is 2**20 bytes, as in PyTorch's `bucket_cap_mb`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from course_lib.link_cost import LinkCost
from course_lib.timeline import Span, Timeline

MB = 2**20


@dataclass(frozen=True)
class GradientProfile:
    """What one run tells about a model: its gradients *in ready order* and the time around them.

    `names`, `bytes` and `ready_s` have one entry a gradient. `ready_s` is when the gradient is final,
    from the start of the last micro-step's backward, maximum over ranks. `Tf` and `Tb` are seconds of
    forward and backward of one micro-step, `To` of the optimizer, `N` the micro-steps of one update.
    Raises `ValueError` on an empty profile, gradients out of order, or sizes and times that cannot be.
    """

    names: tuple[str, ...]
    bytes: tuple[int, ...]
    ready_s: tuple[float, ...]
    Tf: float
    Tb: float
    To: float = 0.0
    N: int = 1

    def __post_init__(self) -> None:
        for field, kind in (("names", str), ("bytes", int), ("ready_s", float)):
            object.__setattr__(self, field, tuple(kind(v) for v in getattr(self, field)))
        if not self.names:
            raise ValueError("the profile has no gradients; record a backward of a model whose parameters require grad")
        if not len(self.names) == len(self.bytes) == len(self.ready_s):
            raise ValueError(f"{len(self.names)} names, {len(self.bytes)} sizes and {len(self.ready_s)} ready times; "
                             "give one of each per gradient")
        if len(set(self.names)) < len(self.names):
            raise ValueError("a gradient is named twice; list a tied parameter once, at its last use")
        for name, size in zip(self.names, self.bytes):
            if size <= 0:
                raise ValueError(f"gradient {name!r} has {size} bytes; leave parameters without elements out")
        if not all(math.isfinite(t) and t >= 0 for t in (*self.ready_s, self.Tf, self.Tb, self.To)):
            raise ValueError("a time of the profile is negative or not finite; "
                             "measure ready times from the start of the backward, in seconds")
        for (t, name), (u, later) in pairwise(zip(self.ready_s, self.names)):
            if u < t:
                raise ValueError(f"{later!r} is ready before {name!r}, which is listed first; "
                                 "sort the gradients by ready time (GradientProfile.sorted)")
        if self.N < 1:
            raise ValueError(f"N is {self.N}; an update has at least one micro-step")

    @classmethod
    def sorted(cls, names: Sequence[str], bytes: Sequence[int], ready_s: Sequence[float], Tf: float, Tb: float,
               To: float = 0.0, N: int = 1) -> GradientProfile:
        """The same profile from gradients in any order (stable: ties keep the given order)."""
        order = sorted(range(len(names)), key=lambda i: ready_s[i])
        return cls(*(tuple(column[i] for i in order) for column in (names, bytes, ready_s)), Tf, Tb, To, N)

    @property
    def total_bytes(self) -> int:
        """G, the bytes of one full gradient."""
        return sum(self.bytes)

    @property
    def Tc(self) -> float:
        """Seconds of all compute of the update: N(Tf + Tb) + To."""
        return self.N * (self.Tf + self.Tb) + self.To

    @property
    def backward_start(self) -> float:
        """Seconds from the start of the step to the backward that communicates: (N−1)(Tf + Tb) + Tf."""
        return (self.N - 1) * (self.Tf + self.Tb) + self.Tf


@dataclass(frozen=True)
class BucketPlan:
    """Which gradients travel together, in issue order. `buckets` holds parameter names, `bytes` the size
    of each bucket. Prints as `(1.0, 3.0, 4.0, 8.0) MB`."""

    buckets: tuple[tuple[str, ...], ...]
    bytes: tuple[int, ...]

    @classmethod
    def of(cls, profile: GradientProfile, buckets: Sequence[Sequence[str]]) -> BucketPlan:
        """A plan from names alone, in any order. Raises `ValueError` unless every gradient of the profile
        is in exactly one bucket and no bucket is empty."""
        size = dict(zip(profile.names, profile.bytes))
        if sorted(n for b in buckets for n in b) != sorted(profile.names) or not all(buckets):
            raise ValueError("the buckets are not a partition of the profile's gradients; "
                             "put every gradient into exactly one bucket and leave no bucket empty")
        return cls(tuple(tuple(b) for b in buckets), tuple(sum(size[n] for n in b) for b in buckets))

    def __len__(self) -> int:
        return len(self.buckets)

    def __str__(self) -> str:
        sizes = (b / MB for b in self.bytes)
        return f"({', '.join(f'{s:.1f}' if s >= 0.1 else f'{s:.2g}' for s in sizes)}) MB"


def _cut(profile: GradientProfile, ends: Sequence[int]) -> BucketPlan:
    """The contiguous plan whose buckets stop before the given indices (the last is the number of gradients)."""
    return BucketPlan.of(profile, [profile.names[i:j] for i, j in pairwise((0, *ends))])


def capped_plan(profile: GradientProfile, caps_bytes: Sequence[float]) -> BucketPlan:
    """What DDP does with a list of caps (its `_compute_bucket_assignment_by_size`): gradients join in
    ready order, a bucket closes as soon as its size is *at least* its cap, the last cap repeats, and a
    parameter is never split. Raises `ValueError` on no cap or a cap that is not positive."""
    if not caps_bytes or not all(c > 0 for c in caps_bytes):
        raise ValueError(f"bucket caps of {list(caps_bytes)} bytes; give at least one, each above 0 "
                         "(DDP's default is 25 * MB)")
    ends, size = [], 0
    for j, b in enumerate(profile.bytes, 1):
        size += b
        if size >= caps_bytes[min(len(ends), len(caps_bytes) - 1)]:
            ends.append(j)
            size = 0
    return _cut(profile, ends if size == 0 else [*ends, len(profile.bytes)])


def uniform_plan(profile: GradientProfile, cap_bytes: float, first_cap_bytes: float | None = None) -> BucketPlan:
    """DDP's layout for one cap. `DDP(bucket_cap_mb=x)` is `uniform_plan(profile, x * MB)`; DDP's default is
    `uniform_plan(profile, 25 * MB, 1 * MB)`, because only the default has the small first bucket."""
    return capped_plan(profile, [cap_bytes] if first_cap_bytes is None else [first_cap_bytes, cap_bytes])


def best_plan(profile: GradientProfile, link: LinkCost) -> BucketPlan:
    """The contiguous plan whose last bucket finishes soonest, and among those the one with fewest buckets.

    Forward, the earliest finish of every prefix by dynamic programming: for contiguous buckets an
    earlier prefix never hurts what follows. O(n²) time, vectorised over the last cut; O(n) memory.
    Backward, from that finish as a deadline, the largest last bucket that still meets it: moving a
    gradient from an earlier bucket into a later one costs the wire nothing, so this is never worse.
    """
    ready, n = profile.ready_s, len(profile.bytes)
    before = np.concatenate(([0.0], np.cumsum(profile.bytes, dtype=np.float64)))
    soonest = np.zeros(n + 1)
    for j in range(1, n + 1):
        soonest[j] = (np.maximum(soonest[:j], ready[j - 1]) + link.cost(before[j] - before[:j])).min()
    ends, j, deadline = [], n, soonest[n] * (1 + 1e-12)  # room for rounding; a femtosecond in a second
    while j:
        ends.append(j)
        latest = deadline - link.cost(before[j] - before[:j])
        i = int(np.argmax(np.maximum(soonest[:j], ready[j - 1]) <= latest))
        j, deadline = i, latest[i]
    return _cut(profile, ends[::-1])


def launches(profile: GradientProfile, plan: BucketPlan) -> list[tuple[float, float, float]]:
    """(first gradient ready, last gradient ready, launched) of every bucket. Buckets are launched in plan
    order on every rank, so one that is full early still waits for those before it."""
    at = dict(zip(profile.names, profile.ready_s))
    if sorted(n for b in plan.buckets for n in b) != sorted(at):
        raise ValueError("the plan was made for other gradients than the profile's; make both from the same run")
    spans = [(min(at[n] for n in b), max(at[n] for n in b)) for b in plan.buckets]
    return [(first, full, go) for (first, full), go in zip(spans, accumulate((full for _, full in spans), max))]


def finish_times(profile: GradientProfile, link: LinkCost, plan: BucketPlan) -> tuple[float, ...]:
    """f_i = max(f_{i−1}, r_i) + c(S_i) of every bucket, in seconds from the start of the last backward.
    The plan may be in any order: forward-order buckets are full late and finish late."""
    out: list[float] = []
    for (_, _, launched), size in zip(launches(profile, plan), plan.bytes):
        out.append(max(out[-1] if out else 0.0, launched) + link.cost(size))
    return tuple(out)


@dataclass(frozen=True)
class Prediction:
    """A predicted step: `step_s` seconds for the whole update, `exposed_s` of them with communication that
    nothing hides, `finish_s` of every bucket from the start of the last backward, and the same as spans
    (rank 0, step 0, the step starting at 0 ns, provenance `simulated`)."""

    plan: BucketPlan
    step_s: float
    exposed_s: float
    finish_s: tuple[float, ...]
    timeline: Timeline


def _spans(profile: GradientProfile, link: LinkCost, plan: BucketPlan, finish: Sequence[float], step_s: float):
    micro, start = profile.Tf + profile.Tb, profile.backward_start
    yield "step", "step", "step 0", 0.0, step_s, -1, -1
    for k in range(profile.N):
        yield "compute", "device", f"forward {k}", k * micro, k * micro + profile.Tf, -1, -1
        yield "compute", "device", f"backward {k}", k * micro + profile.Tf, (k + 1) * micro, -1, -1
    if profile.To:
        yield "compute", "device", "optimizer", step_s - profile.To, step_s, -1, -1
    for i, ((first, full, launched), size, end) in enumerate(zip(launches(profile, plan), plan.bytes, finish)):
        begin = max(launched, finish[i - 1] if i else 0.0)
        yield "fill", "bucket", f"bucket {i}", start + first, start + full, size, i
        yield "queue", "wire", f"bucket {i}", start + launched, start + begin, size, i
        yield "comm", "wire", "all_reduce", start + begin, start + end, size, i


def predict(profile: GradientProfile, link: LinkCost, plan: BucketPlan) -> Prediction:
    """One update of N micro-steps of which only the last communicates (`no_sync` before it):
    T = (N−1)(Tf + Tb) + Tf + max(Tb, f_last) + To, exposed = max(0, f_last − Tb)."""
    finish = finish_times(profile, link, plan)
    step_s = profile.backward_start + max(profile.Tb, finish[-1]) + profile.To
    spans = (Span(0, kind, lane, name, round(t * 1e9), round(u * 1e9), size, bucket, 0)
             for kind, lane, name, t, u, size, bucket in _spans(profile, link, plan, finish, step_s))
    return Prediction(plan, step_s, max(0.0, finish[-1] - profile.Tb), finish, Timeline.of(spans, "simulated"))


def step_serial(profile: GradientProfile, link: LinkCost) -> float:
    """T_serial: all compute of the update, then one blocking flat all-reduce. Seconds."""
    return profile.Tc + link.cost(profile.total_bytes)


def step_bound(profile: GradientProfile, link: LinkCost) -> float:
    """T_bound: the step of the best contiguous plan. Seconds."""
    return predict(profile, link, best_plan(profile, link)).step_s


def step_floor(profile: GradientProfile, link: LinkCost, beta_s_per_byte: float | None = None) -> float:
    """T_floor, which no plan of any shape beats: bytes that are not ready cannot travel, so the wire ends no
    earlier than a + max_j(r_j + β'·Σ_{i≥j} S_i) into the backward. β' is the link's unless given. Seconds."""
    beta = link.beta_s_per_byte if beta_s_per_byte is None else beta_s_per_byte
    rest = np.cumsum(profile.bytes[::-1], dtype=np.float64)[::-1]
    last = link.a_s + float((np.array(profile.ready_s) + beta * rest).max())
    return profile.backward_start + max(profile.Tb, last) + profile.To


def ddp_arguments(plan: BucketPlan) -> dict[str, float | list[float]]:
    """Arguments that give stock `DistributedDataParallel` this plan from its second iteration on (the first
    runs before DDP knows the ready order).

    `bucket_cap_mb_list` (torch ≥ 2.13; leave it out before) reproduces a plan in ready order exactly: the
    caps are the bucket sizes, a bucket closes when its size reaches its cap, and the last cap repeats.
    DDP applies them per dtype and device. `bucket_cap_mb` is the uniform cap with as many equal buckets as the
    plan has: the nearest that older versions can do. In MB of 2**20 bytes.
    """
    return {"bucket_cap_mb": sum(plan.bytes) / len(plan) / MB, "bucket_cap_mb_list": [b / MB for b in plan.bytes]}
