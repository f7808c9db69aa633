"""A window of ZeRO on a shared wire, against what can be said in closed form."""

from __future__ import annotations

import pytest

from course_lib.link_cost import LinkCost
from course_lib.overlap import report
from course_lib.simulate.zero import Units, predict_zero

GATHER, REDUCE = LinkCost(1e-3, 1e-9), LinkCost(2e-3, 1e-9)
CG, CR = GATHER.cost(1e6), REDUCE.cost(1e6)
FED, STARVED = Units(5, 1e6, 0.01, 0.02), Units(5, 1e6, 1e-5, 2e-5)


def predicted(units: Units, stage: int, ahead: int = 1, N: int = 1):
    return predict_zero(units, N, GATHER, REDUCE, stage, ahead)


@pytest.mark.parametrize("N", [1, 3])
@pytest.mark.parametrize("stage", [1, 2])
def test_with_enough_compute_the_first_gather_and_the_last_reduction_are_exposed(stage: int, N: int) -> None:
    assert predicted(FED, stage, N=N).exposed_s == pytest.approx(CG + CR)


@pytest.mark.parametrize("N", [1, 3])
def test_stage_3_exposes_as_much_in_every_micro_step(N: int) -> None:
    """Between two micro-steps the gather alone is waited for: when the last reduction begins to move bytes, it is
    there."""
    assert predicted(FED, 3, N=N).exposed_s == pytest.approx(N * CG + CR)


def test_what_moves_at_the_same_time_shares_the_wire() -> None:
    """As above, but both begin to move bytes at once."""
    alike = predict_zero(FED, 3, GATHER, GATHER, stage=3)
    assert alike.exposed_s == pytest.approx(CG + CG + 2 * (CG + 1e-3))


def test_without_prefetch_every_gather_is_waited_for() -> None:
    """All units in forward, all but the last in backward, where a reduction shares the wire with all but the first."""
    alone, shared = 5 + 1, 3
    least = alone * CG + CR
    assert least + shared * CG <= predicted(FED, 3, ahead=0).exposed_s <= least + shared * (CG + CR)


def test_depth_never_beats_the_wire_or_the_device() -> None:
    for units in (FED, STARVED):
        moved = 2 * ((2 * units.count - 1) + units.count) * 1e6 * 1e-9
        for ahead in range(4):
            assert predicted(units, 3, ahead, N=2).step_s >= max(moved, 2 * units.count * (units.Tf + units.Tb))


def test_where_one_ahead_hides_the_gathers_two_hide_no_more() -> None:
    steps = [predicted(FED, 3, ahead, N=2).step_s for ahead in range(4)]
    assert steps[0] > 1.1 * steps[1]
    assert steps[1:] == pytest.approx([steps[1]] * 3)


def test_starved_units_wait_for_the_wire_whatever_the_depth() -> None:
    one, deep = (predicted(STARVED, 3, ahead).step_s for ahead in (1, 4))
    assert deep > 0.6 * one, "latency is what depth still hides"
    assert deep > 20 * STARVED.count * (STARVED.Tf + STARVED.Tb)


def test_stage_3_sends_what_the_library_does() -> None:
    """Gathers for forward and backward, but that the last unit stays; a reduction a unit and micro-step."""
    spans = predicted(FED, 3, N=2).timeline.select(kind="comm")
    assert [sum(s.name == name for s in spans) for name in ("all_gather", "reduce_scatter")] == [18, 10]
    assert [sum(s.name == "all_gather" for s in predicted(FED, stage, N=2).timeline) for stage in (1, 2)] == [5, 5]
    assert [sum(s.name == "reduce_scatter" for s in predicted(FED, stage, N=2).timeline) for stage in (1, 2)] == [5, 10]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_timeline_says_the_same(stage: int) -> None:
    found = predicted(FED, stage, N=2)
    row = report(found.timeline).pooled
    assert row.span == pytest.approx(found.step_s * 1e9, rel=1e-6)
    assert row.exposed == pytest.approx(found.exposed_s * 1e9, rel=1e-3)


@pytest.mark.parametrize("wrong", [{"stage": 0}, {"stage": 3, "ahead": -1}, {"stage": 3, "N": 0}])
def test_what_cannot_be_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="choose stage 1, 2 or 3"):
        predicted(FED, **wrong)
