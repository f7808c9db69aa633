"""Sending every micro-step against sending once: never shorter, equal where the wire has drained, longer above."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import overlap
from course_lib.link_cost import LinkCost
from course_lib.simulate.buckets import BucketPlan, GradientProfile, finish_times, predict
from course_lib.simulate.every_step import predict_ddp_every_step, predict_every_step

MS = st.floats(0, 50).map(lambda ms: ms / 1e3)


@st.composite
def updates(draw) -> tuple[GradientProfile, LinkCost, BucketPlan]:
    count = draw(st.integers(1, 6))
    gaps = [draw(MS) for _ in range(count)]
    ready = [sum(gaps[:i + 1]) for i in range(count)]
    names = [f"p{i}" for i in range(count)]
    profile = GradientProfile(names, [draw(st.integers(1, 1000)) for _ in names], ready, draw(MS),
                              ready[-1] + draw(MS) / 10, draw(MS), draw(st.integers(1, 7)))
    cuts = sorted(draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    plan = BucketPlan.of(profile, [names[i:j] for i, j in zip([0, *cuts], [*cuts, count])])
    return profile, LinkCost(draw(MS) / 5, draw(st.floats(0, 1e-4))), plan


def closed_form(profile: GradientProfile, link: LinkCost, plan: BucketPlan) -> float:
    """The recursion of the module's docstring, with the wait for the set of two micro-steps before."""
    f, C = finish_times(profile, link, plan)[-1], sum(link.cost(size) for size in plan.bytes)
    compute, arrived = 0.0, [0.0, 0.0]
    for _ in range(profile.N):
        begin = max(compute, arrived[-2]) + profile.Tf
        arrived.append(max(begin + f, arrived[-1] + C))
        compute = begin + profile.Tb
    return max(compute, arrived[-1]) + profile.To


@settings(max_examples=300, deadline=None)
@given(updates())
def test_it_is_never_shorter_and_ties_exactly_when_the_wire_has_drained(update) -> None:
    profile, link, plan = update
    every, once = predict_every_step(profile, link, plan), predict(profile, link, plan)
    assert every.step_s == pytest.approx(closed_form(profile, link, plan))
    assert every.loss_s >= -1e-12
    assert every.loss_s == pytest.approx(every.step_s - once.step_s)
    f, C = finish_times(profile, link, plan)[-1], sum(link.cost(size) for size in plan.bytes)
    if f <= profile.Tb + profile.Tf + profile.ready_s[0]:
        assert every.loss_s == pytest.approx(0, abs=1e-9)
    assert every.step_s >= profile.N * C
    assert predict_ddp_every_step(profile, link, plan) >= once.step_s - 1e-12


@settings(max_examples=50, deadline=None)
@given(updates())
def test_the_timeline_says_the_same(update) -> None:
    profile, link, plan = update
    every = predict_every_step(profile, link, plan)
    pooled = overlap.report(every.timeline).pooled
    assert pooled.span == pytest.approx(every.step_s * 1e9, abs=10)
    assert (pooled.exposed or 0) == pytest.approx((every.step_s - profile.Tc) * 1e9, abs=50 * profile.N)
    sent = [s for s in every.timeline if s.kind == "comm"]
    assert sum(s.bytes for s in sent) == every.bytes == profile.N * profile.total_bytes
    assert len(sent) == profile.N * len(plan)
    assert all(a.stop <= b.start + 2 for a, b in pairwise(sent)), "the wire carries one bucket at a time"


def equal(N: int, layers: int = 4) -> tuple[GradientProfile, BucketPlan]:
    """Layers of 1 MB, 1 ms forward and 2 ms backward each."""
    names = [f"p{i}" for i in range(layers)]
    profile = GradientProfile(names, [2**20] * layers, [(i + 1) * 2e-3 for i in range(layers)], layers * 1e-3,
                              layers * 2e-3, N=N)
    return profile, BucketPlan.of(profile, [[n] for n in names])


@pytest.mark.parametrize(("r", "ties"), [(0.5, True), (0.95, True), (1.3, False), (2, False)])
def test_the_border_is_near_r_equal_to_1(r: float, ties: bool) -> None:
    """r: one micro-step's traffic over one micro-step's compute."""
    for N in (2, 4, 8):
        profile, plan = equal(N)
        link = LinkCost(0, r * (profile.Tf + profile.Tb) / profile.total_bytes)
        assert (predict_every_step(profile, link, plan).loss_s < 1e-9) == ties


def test_the_ratio_is_higher_where_the_step_is_the_same() -> None:
    profile, plan = equal(4)
    link = LinkCost(0, 0.8 * (profile.Tf + profile.Tb) / profile.total_bytes)
    every, once = predict_every_step(profile, link, plan), predict(profile, link, plan)
    ratios = [overlap.report(one.timeline).pooled.overlap for one in (every, once)]
    assert every.step_s == pytest.approx(once.step_s) and ratios[0] > ratios[1] + 0.1
    assert every.buffer_bytes == 2 * profile.total_bytes
