"""The joint schedule predicted: the period by hand, the bound under everything that can run, and the search."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.link_cost import LinkCost
from course_lib.schedule import Op, Schedule, ScheduleError, check, interleaved, one_f_one_b, zb_v, zero_bubble
from course_lib.schedule.joint import naive, reductions_at_last_use, steps_by_bucket, under_the_next_pass
from course_lib.simulate.bound import bound, bounds
from course_lib.simulate.greedy import _built, _Rule, greedy
from course_lib.simulate.pipeline import Costs, period, predict, updates
from course_lib.simulate.place import joint, just_in_time
from course_lib.simulate.search import _moved, search

ONE = "stages on ranks 0; 1 micro-batches; buckets 2\nrank 0: "
RULE = _Rule(None, 2, 1, True)
COSTS = Costs(F=0.010, B=0.020, reduce=0.004, gather=0.006, step=0.002)


def placed(bare: Schedule, ratio: float = 0.4) -> Costs:
    """F = I = W = 40 ms, and gradients and parameters that travel for `ratio` of the pipeline's time."""
    step = predict(bare, Costs(F=0.04, I=0.04, W=0.04)).step_s
    of_a_stage = ratio * step / (bare.stages / len(bare.ranks))
    return Costs(F=0.04, I=0.04, W=0.04, reduce=of_a_stage / 4, gather=of_a_stage / 2, step=0.002)


@pytest.mark.parametrize(("text", "ms"), [
    ("F0 B0 free reduce0 reduce1 step gather", 30 + 8 + 2 + 6),
    ("F0 B0 free reduce0 reduce1 step0 gather0 step1 gather1", 30 + 8 + 6),  # one wire; a bucket steps under the other
    ("step gather F0 B0 free reduce0 reduce1", 30 + 8 + 2 + 6),
])
def test_an_update_by_hand(text: str, ms: float) -> None:
    """One stage alone: nothing to hide under but its own buckets."""
    made = Schedule.parse(ONE + text)
    assert period(made, COSTS) == pytest.approx(ms / 1e3)
    assert bound(made, COSTS).seconds <= period(made, COSTS) + 1e-9


def test_what_the_first_pass_has_no_gradient_for_is_left_out() -> None:
    made = Schedule.parse(ONE + "step gather F0 B0 free reduce0 reduce1")
    timeline = predict(made, COSTS, passes=3).timeline
    assert [s.step for s in timeline if s.name == "step" and s.kind == "compute"] == [1, 2]
    assert updates(timeline) == pytest.approx([0.046, 0.046])
    assert timeline.steps == [0, 1, 2]


def test_ranks_that_do_not_step_wait_for_their_reductions() -> None:
    made = Schedule.parse(ONE + "F0 B0 reduce0 reduce1")
    assert period(made, COSTS) == pytest.approx(0.038)


@settings(deadline=None, max_examples=15)
@given(p=st.integers(1, 3), m=st.integers(1, 3), v=st.integers(1, 3), buckets=st.integers(1, 3), data=st.data(),
       make=st.sampled_from([zero_bubble, interleaved]))
def test_no_schedule_is_faster_than_the_bound(p: int, m: int, v: int, buckets: int, data, make) -> None:
    ms = st.integers(0, 30).map(lambda n: n / 1000)
    each = [data.draw(st.lists(ms, min_size=p * v, max_size=p * v)) for _ in range(6)]
    costs = Costs(F=each[0], I=each[1], W=each[2], reduce=each[3], gather=each[4], step=each[5],
                  link=LinkCost(0.001, 0.0))
    bare = make(p, m, v)
    made = reductions_at_last_use(naive(bare, buckets))
    draw = random.Random(0)
    for schedule in (naive(bare, buckets), made, under_the_next_pass(steps_by_bucket(made)),
                     just_in_time(steps_by_bucket(made), costs), _built(naive(bare, buckets), costs, RULE)):
        for _ in range(3):
            try:
                took = period(schedule, costs)
            except ScheduleError:
                schedule = made
                continue
            assert took >= bound(schedule, costs).seconds - 2e-8 * p * v * m, schedule.text()
            schedule = _moved(schedule, draw)


def test_the_bound_names_what_is_short() -> None:
    bare = naive(zero_bubble(2, 2, 2), 2)
    assert bound(bare, Costs(F=1.0, I=1.0, W=1.0)) == (12.0, "device of rank 1")
    assert bound(bare, Costs(F=0.1, reduce=1.0, gather=2.0)).path.startswith("wire of rank")
    assert bound(naive(one_f_one_b(3, 1)), Costs(F=1.0, B=2.0, reduce=0.5)).seconds == 9.5
    assert len(bounds(bare, COSTS)) == 2 * 2 + 4 + 3 + 2 + 1 + 4


@pytest.mark.parametrize(("bare", "attained", "faster"), [
    pytest.param(zero_bubble(2, 4, 3), 0.95, 1.35, marks=pytest.mark.slow),
    pytest.param(zero_bubble(2, 3, 4), 0.98, 1.4, marks=pytest.mark.slow), (zb_v(2, 4), 0.6, 1.2)])
def test_greedy_fills_the_bubbles(bare: Schedule, attained: float, faster: float) -> None:
    costs, start = placed(bare), naive(bare, 2)
    made = greedy(bare, costs, 2)
    check(made)
    base, took, least = (period(start, costs), period(made, costs), bound(start, costs).seconds)
    assert (base - took) / (base - least) >= attained and base / took >= faster
    assert took < period(joint(bare, costs, 2), costs) < period(reductions_at_last_use(start), costs) < base


def test_greedy_keeps_to_the_memory_that_it_is_given() -> None:
    bare = zero_bubble(2, 2, 3)
    for memory in (5, 6):
        assert max(check(greedy(bare, placed(bare), 2, memory)).peak_activations) == memory
    with pytest.raises(ScheduleError, match="memory=2 activations are too few"):
        greedy(bare, placed(bare), 2, memory=2)


def test_the_search_only_takes_what_can_run_and_finds_the_same_again() -> None:
    bare = zero_bubble(2, 2, 2)
    costs = placed(bare)
    start = naive(bare, 2)
    found = search(start, costs, moves=150, seed=3, memory=4)
    assert found == search(start, costs, moves=150, seed=3, memory=4)
    assert max(check(found.schedule).peak_activations) <= 4
    assert found.bound.seconds <= found.period_s < found.start_s and 0 < found.valid <= found.tried
    assert found.period_s == period(found.schedule, costs) and found.gap == found.period_s / found.bound.seconds - 1
    seconds = [s for _, s in found.steps]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] == found.period_s
    with pytest.raises(ScheduleError, match="keeps 4 activations on a rank to begin with, more than memory=3"):
        search(start, costs, memory=3)


def test_a_move_may_break_a_schedule_and_check_says_so() -> None:
    """Otherwise the search would not need it."""
    start, draw, refused = naive(zero_bubble(2, 2, 2), 2), random.Random(0), 0
    for _ in range(60):
        other = _moved(start, draw)
        assert sorted(map(str, other.ranks[0])) == sorted(map(str, start.ranks[0]))
        try:
            check(other)
        except ScheduleError:
            refused += 1
    assert 0 < refused < 60


def test_steps_and_gathers_leave_when_their_reduction_has_arrived() -> None:
    made = joint(zero_bubble(2, 4, 3), placed(zero_bubble(2, 4, 3)), 2)
    timeline = predict(made, placed(zero_bubble(2, 4, 3)), passes=4).timeline
    arrived = {(s.rank, s.name.removeprefix("reduce")): s.stop for s in timeline if s.name.startswith("reduce")
               and s.step == 2}
    steps = [s for s in timeline if s.name.startswith(Op.STEP.value) and s.kind == "compute" and s.step in (2, 3)]
    assert len(steps) >= 12 and all(s.stop > arrived.get((s.rank, s.name.removeprefix("step")), 0) or s.step == 2
                                    for s in steps)
