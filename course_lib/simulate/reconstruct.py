"""Which link would explain a published improvement? Two bucket sizes and two shares of exposed communication give a
link: its latency a and its rate, both as parts of the backward pass.

The case that this was written for: 8 nodes of 8 A100, buckets from 25 to 60 MB, "communication from 37 % to 12 %,
1.6 times as fast". With the same compute before and after, a step is T = C/(1 − share), so that the shares alone
give (1 − 0.12)/(1 − 0.37) = 1.40. The 1.6 is what hiding *all* of 37 % would give (1/(1 − 0.37) = 1.59), or it needs
compute that was 1.15 times as long before. Nor can the shares be those of all communication, hidden or not: that
would have had to shrink by 1.6·37/12 = 4.9, and larger buckets only save latency, a factor 60/25 = 2.4 at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from course_lib.link_cost import LinkCost
from course_lib.simulate.buckets import MB, GradientProfile, Prediction, finish_times, predict, uniform_plan


def speedup_of(before: float, after: float) -> float:
    """How much faster a step is whose share of exposed communication falls from `before` to `after`, with the same
    compute. Raises `ValueError` unless both are at least 0 and below 1."""
    if not (0 <= before < 1 and 0 <= after < 1):
        raise ValueError(f"shares of {before} and {after}: give parts of the step, at least 0 and below 1")
    return (1 - after) / (1 - before)


def even_profile(total_mb: float, layers: int, Tb: float, parameters: int = 1) -> GradientProfile:
    """`layers` equal layers of `parameters` gradients each, whose backward takes Tb seconds in all and whose forward
    half of that."""
    count = layers * parameters
    return GradientProfile(tuple(f"layer {i // parameters}, {i % parameters}" for i in range(count)),
                           (round(total_mb * MB / count),) * count,
                           tuple((i // parameters + 1) * Tb / layers for i in range(count)), Tb / 2, Tb)


@dataclass(frozen=True)
class Reconstruction:
    """The link, as the cost of one collective, and the two steps on it. `r` is Tm/Tc."""

    profile: GradientProfile
    link: LinkCost
    before: Prediction
    after: Prediction

    @property
    def r(self) -> float:
        return self.link.cost(self.profile.total_bytes) / self.profile.Tc

    @property
    def shares(self) -> tuple[float, float]:
        """Exposed communication as a part of the step, before and after."""
        return self.before.exposed_s / self.before.step_s, self.after.exposed_s / self.after.step_s

    @property
    def speedup(self) -> float:
        return self.before.step_s / self.after.step_s

    def message(self, ranks: int) -> LinkCost:
        """α and β of one message, if the collective is a ring over so many ranks."""
        return LinkCost(self.link.a_s / (2 * (ranks - 1)),
                        self.link.beta_s_per_byte * ranks / (2 * (ranks - 1)))

    def on(self, link: LinkCost) -> GradientProfile:
        """The same case for another link: backward and gradient in such a proportion to its a and β that the shares
        stay. Buckets keep their part of the gradient. Raises `ValueError` for a link without latency or rate."""
        if not (link.a_s > 0 and link.beta_s_per_byte > 0):
            raise ValueError(f"{link} has no latency or no rate; the case lives on both, so give the wire a latency "
                             "(latency_us) and a rate (gbit)")
        slower = link.a_s / self.link.a_s
        larger = slower * self.link.beta_s_per_byte / link.beta_s_per_byte
        p = self.profile
        return GradientProfile(p.names, tuple(max(1, round(b * larger)) for b in p.bytes),
                               tuple(t * slower for t in p.ready_s), p.Tf * slower, p.Tb * slower, p.To * slower, p.N)


def reconstruct(profile: GradientProfile, caps_mb: tuple[float, float] = (25.0, 60.0),
                shares: tuple[float, float] = (0.37, 0.12)) -> Reconstruction:
    """The link on which buckets of `caps_mb` MB expose these shares of the step. Found by bisection: for a latency,
    the rate that gives the second share; among those, the latency that gives the first.

    Raises `ValueError` where no link does: two shares so different that latency alone cannot explain them, or so
    alike that there would have to be less than none.
    """
    plans = [uniform_plan(profile, cap * MB) for cap in caps_mb]
    exposed = [share / (1 - share) * profile.Tc for share in shares]

    def exceeds(which: int, link: LinkCost) -> bool:
        return finish_times(profile, link, plans[which])[-1] - profile.Tb > exposed[which]

    def rate(a: float) -> LinkCost:
        top = (exposed[1] + profile.Tb) / profile.total_bytes
        return LinkCost(a, _bisect(lambda beta: exceeds(1, LinkCost(a, beta)), top))

    latest = _bisect(lambda a: exceeds(1, LinkCost(a, 0.0)), exposed[1] + profile.Tb)
    if exceeds(0, rate(0.0)) or not exceeds(0, rate(latest)):
        raise ValueError(f"no link exposes {shares[0]:.0%} of the step with buckets of {caps_mb[0]:g} MB and "
                         f"{shares[1]:.0%} with {caps_mb[1]:g} MB: latency is all that the sizes change; give other "
                         "sizes, shares, or another gradient")
    link = rate(_bisect(lambda a: exceeds(0, rate(a)), latest))
    return Reconstruction(profile, link, *(predict(profile, link, plan) for plan in plans))


def _bisect(exceeds: Callable[[float], bool], top: float) -> float:
    """The largest number from 0 to `top` that does not exceed, to one part in 2^40 of `top`."""
    low, high = 0.0, top
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if exceeds(middle) else (middle, high)
    return low
