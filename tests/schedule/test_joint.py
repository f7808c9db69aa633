"""The joint schedule without ranks: its passes, and what `check` says of passes that follow each other."""

from __future__ import annotations

from collections import Counter

import pytest

from course_lib.schedule import (
    Action,
    Op,
    Schedule,
    ScheduleError,
    add_reductions,
    add_steps,
    check,
    interleaved,
    one_f_one_b,
    zb_v,
    zero_bubble,
)
from course_lib.schedule.cycle import carried, held_over
from course_lib.schedule.degrees import Degrees
from course_lib.schedule.joint import (
    delay_weights,
    first_needed_first,
    naive,
    reductions_at_last_use,
    steps_by_bucket,
    under_the_next_pass,
)
from course_lib.timeline import Span, Timeline

PASSES = {"reductions": reductions_at_last_use, "steps": steps_by_bucket, "first": first_needed_first,
          "delay": lambda s: delay_weights(s, 3), "next": under_the_next_pass,
          "far": lambda s: under_the_next_pass(s, 5)}
BARE = {"zero bubble": zero_bubble(2, 4, 3), "zb-v": zb_v(3, 4), "interleaved": interleaved(2, 4, 2),
        "1f1b": one_f_one_b(3, 2), "alone": zero_bubble(1, 3, 3)}


def words(schedule: Schedule, rank: int) -> str:
    return schedule.text().splitlines()[1 + rank].split(": ")[1]


@pytest.mark.parametrize("name", BARE)
def test_every_row_of_passes_runs_and_does_the_same_work(name: str) -> None:
    made = naive(BARE[name], 2)
    for turn in (["reductions"], ["steps"], ["delay", "first"], ["next"], ["far", "reductions"], ["reductions", "far"]):
        for one in turn:
            before, made = made, PASSES[one](made)
            check(made)
            assert Schedule.parse(made.text()) == made
            for old, new in zip(before.ranks, made.ranks):
                compute = [Counter(a for a in actions if a.op is not Op.STEP and a.op is not Op.GATHER)
                           for actions in (old, new)]
                assert compute[0] == compute[1], one


def test_naive_does_everything_behind_the_compute() -> None:
    made = naive(zb_v(2, 1), 2)
    assert words(made, 0) == ("F0@0 F0@3 I0@3 W0@3 I0@0 W0@0 free@3 free@0 reduce0@3 reduce1@3 reduce0@0 reduce1@0 "
                              "step@3 step@0 gather@3 gather@0")
    assert held_over(made, 0) == {(0, 0), (0, 1), (3, 0), (3, 1)}
    assert not carried(made, 0)


def test_reductions_leave_behind_the_last_w_of_their_stage() -> None:
    made = reductions_at_last_use(naive(zero_bubble(2, 3, 2), 2))
    for rank, actions in enumerate(made.ranks):
        for stage in made.stages_of(rank):
            last = max(k for k, a in enumerate(actions) if a.stage == stage and a.op is Op.W)
            assert actions[last + 1:last + 4] == (Action(Op.FREE, stage), Action(Op.REDUCE, stage, 0),
                                                  Action(Op.REDUCE, stage, 1))


def test_the_stage_needed_first_is_done_first() -> None:
    base = reductions_at_last_use(naive(zb_v(2, 4), 1))
    for keep, behind in ((0, 0), (2, 2), (4, 4), (9, 4)):
        made = first_needed_first(delay_weights(base, keep))
        actions = made.ranks[0]
        reduce = actions.index(Action(Op.REDUCE, 0, 0))
        assert sum(a.op is Op.W and a.stage == 3 for a in actions[reduce:]) == behind
    assert check(first_needed_first(delay_weights(base, 4))).peak_activations[0] > check(base).peak_activations[0]


def test_only_the_stage_needed_first_is_stepped_before_the_pass_ends() -> None:
    made = under_the_next_pass(steps_by_bucket(reductions_at_last_use(naive(zero_bubble(2, 4, 2), 2))))
    assert carried(made, 0) == (Action(Op.STEP, 2, 0), Action(Op.STEP, 2, 1))
    assert words(made, 0).startswith("F0@0 step0@2 gather0@2 step1@2 gather1@2 F1@0 F0@2 F1@2")
    assert words(made, 0).endswith("step0@0 gather0@0 step1@0 gather1@0")
    assert held_over(made, 0) == {(0, 0), (0, 1)}
    late = under_the_next_pass(steps_by_bucket(add_steps(add_reductions(zero_bubble(2, 4, 2), 2))), ahead=0)
    assert words(late, 1).startswith("F0@1 F1@1 step0@3 step1@3 F0@3 I0@3"), "whole parameters: nothing to gather"




@pytest.mark.parametrize(("text", "says"), [
    ("F0 B0 free reduce0 reduce1 gather step", "does gather before the step of bucket 0 of stage 0"),
    ("F0 B0 free reduce0 reduce1 step0 gather1 step1 gather0", "does gather1 before the step of bucket 1"),
    ("F0 B0 free reduce0 reduce1 step0 gather0 gather1", "steps bucket 1 of stage 0 0 times"),
    ("F0 B0 free reduce0 reduce1 step step1 gather", "steps bucket 1 of stage 0 2 times"),
    ("step0 F0 B0 free reduce0 reduce1 step0 step1 gather", "has step0 2 times"),
    ("F0 B0 free reduce0 reduce1 gather", "at the end of the pass, but the optimizer steps after it"),
    ("F0 B0 free reduce0 step1 reduce1 step0 gather", "stands at step1 .* waits for reduce1, which comes later"),
    ("F0 B0 free reduce0 reduce1 step gather gather", "gathered already"),
    ("F0 B0 reduce0 reduce1 step gather", "never frees stage 0"),
    ("gather0 F0 B0 free reduce0 reduce1 step", "parameters that are not gathered|before the step"),
    ("F0 step0 B0 free reduce0 reduce1 step1 gather", "does step0 while stage 0 is in use"),
])
def test_turns_that_cannot_be(text: str, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        check(Schedule.parse(f"stages on ranks 0; 1 micro-batches; buckets 2\nrank 0: {text}"))


@pytest.mark.parametrize("text", [
    "F0 B0 free reduce0 reduce1 step gather", "step gather F0 B0 free reduce0 reduce1",
    "step1 gather1 F0 B0 free reduce0 reduce1 step0 gather0", "gather F0 B0 free reduce0 reduce1",
    "step0 step1 gather F0 free gather B0 free reduce0 reduce1", "step F0 B0 reduce1 reduce0",
])
def test_turns_that_can_be(text: str) -> None:
    made = Schedule.parse(f"stages on ranks 0; 1 micro-batches; buckets 2\nrank 0: {text}")
    check(made)
    assert Schedule.parse(made.text()) == made


@pytest.mark.parametrize(("call", "says"), [
    (lambda: naive(naive(zb_v(2, 2))), "already"), (lambda: delay_weights(zb_v(2, 2), -1), "keep=-1"),
    (lambda: naive(zb_v(2, 2), [1, 2]), "for 4 stages"),
])
def test_refusals(call, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        call()


def test_one_pipeline_of_a_block_of_ranks() -> None:
    whole = Timeline.of([Span(rank, "compute", "device", f"r{rank}", rank, rank + 1) for rank in range(8)], "simulated")
    degrees = Degrees(2, 2, 2)
    assert degrees.ranks == 8
    assert [(s.rank, s.name) for s in degrees.one_pipeline(whole)] == [(0, "r0"), (1, "r2")]
    assert [(s.rank, s.name) for s in degrees.one_pipeline(whole, 1, 1)] == [(0, "r5"), (1, "r7")]
