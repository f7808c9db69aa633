"""Where compression pays: the step of a scheme on a link of any speed, from what it costs and what it sends."""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.link_cost import LinkCost
from course_lib.simulate.buckets import GradientProfile, Prediction, predict, uniform_plan


@dataclass(frozen=True)
class Cost:
    """A scheme, for each byte of float32 gradient: `bytes` that one rank sends, and `host_s` seconds in which its host
    compresses and decompresses. `phases` collectives follow each other for every bucket."""

    bytes: float
    host_s: float = 0.0
    phases: int = 1


def even_profile(total_bytes: int, parts: int, compute_s: float) -> GradientProfile:
    """A model of `parts` equal layers, forward to backward as 1 to 2."""
    Tb = compute_s * 2 / 3
    return GradientProfile(tuple(f"layer {i}" for i in range(parts)), (total_bytes // parts,) * parts,
                           tuple(Tb * (i + 1) / parts for i in range(parts)), compute_s / 3, Tb)  # fmt: skip


def predicted(profile: GradientProfile, gbit: float, cost: Cost, *, a_s: float = 0.0,
              bucket_bytes: float = 2**20) -> Prediction:
    """One update with buckets of `bucket_bytes` on a link of `gbit` Gbit/s a rank and `a_s` of latency a collective.

    The host compresses between two layers' backward passes, so every gradient after it is ready later.
    """
    sent, late = 0, []
    for size, ready in zip(profile.bytes, profile.ready_s):
        sent += size
        late.append(ready + cost.host_s * sent)
    slowed = GradientProfile(profile.names, profile.bytes, tuple(late), profile.Tf,
                             profile.Tb + cost.host_s * profile.total_bytes, profile.To, profile.N)  # fmt: skip
    link = LinkCost(cost.phases * a_s, cost.bytes * 8e-9 / gbit)
    return predict(slowed, link, uniform_plan(slowed, bucket_bytes))


def pays_below(profile: GradientProfile, cost: Cost, plain: Cost, *, a_s: float = 0.0,
               bucket_bytes: float = 2**20) -> float:  # fmt: skip
    """The link speed in Gbit/s below which the step with `cost` is shorter than the one with `plain`; 0 where it never
    is, infinite where it always is. Searched from 1 Mbit/s to 1 Tbit/s."""
    def wins(gbit: float) -> bool:
        times = [predicted(profile, gbit, one, a_s=a_s, bucket_bytes=bucket_bytes).step_s for one in (plain, cost)]
        return times[0] > times[1]

    low, high = 1e-3, 1e3
    if not wins(low):
        return 0.0
    if wins(high):
        return float("inf")
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if wins(middle) else (low, middle)
    return low
