"""Steps and gathers of the joint schedule, placed by what things cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from course_lib.schedule.action import COMPUTE, Action, Op, Schedule
from course_lib.schedule.check import check
from course_lib.schedule.cycle import turn
from course_lib.schedule.joint import (
    delay_weights,
    first_needed_first,
    naive,
    reductions_at_last_use,
    steps_by_bucket,
    under_the_next_pass,
)
from course_lib.simulate.pipeline import Costs, period, predict


def joint(compute: Schedule, costs: Costs, buckets: int | Sequence[int] = 2, memory: int | None = None) -> Schedule:
    """Every pass of `schedule.joint` over a schedule that only computes, with the number of delayed W and the places
    of steps and gathers chosen by the predicted period. No rank keeps more than `memory` activations (micro-batches
    times stages) where it is given. Raises `ScheduleError` as the passes do."""
    given = reductions_at_last_use(naive(compute, buckets))
    found = steps_by_bucket(given)
    for keep in range(compute.micro_batches * (len(compute.stages_of(0)) - 1) + 1):
        made = steps_by_bucket(first_needed_first(delay_weights(given, keep)))
        if keep == 0 or memory is None or max(check(made).peak_activations) <= memory:
            found = min((found, made, just_in_time(made, costs)), key=lambda s: period(s, costs))
    return found


def just_in_time(schedule: Schedule, costs: Costs, rounds: int = 3) -> Schedule:
    """Do each step of a bucket, and the gather behind it, at the first place in its rank's list, or at the front of the
    next pass, at which its reduction is predicted to have arrived: earlier the rank would wait, later the gather would
    come late. Placing one moves the others, so it is done `rounds` times, beginning with the latest places; the best is
    returned."""
    best, now = schedule, under_the_next_pass(steps_by_bucket(schedule), ahead=0)
    for _ in range(rounds):
        now = _placed(now, costs)
        best = min((best, now), key=lambda s: period(s, costs))
    return best


def _placed(schedule: Schedule, costs: Costs) -> Schedule:
    passes = 4
    timeline = predict(schedule, costs, passes).timeline
    out = []
    for rank, actions in enumerate(schedule.ranks):
        spans = timeline.select(rank=rank).spans
        begins = {(s.name, s.step - passes + 2): s.start for s in spans if s.kind == "compute"}
        arrives = {s.name: s.stop for s in spans if s.step == passes - 2 and s.bucket >= 0}
        moving = [a for s in schedule.stages_of(rank) for a in turn(schedule, s) if a.op in (Op.STEP, Op.GATHER)]
        rest = [a for a in actions if a not in moving]  # whole gathers between uses are no buckets' and stay
        ahead: dict[int, list[Action]] = {}
        for reduce in (a for a in rest if a.op is Op.REDUCE):
            bundle = [a for a in moving if (a.stage, a.index) == (reduce.stage, reduce.index)]
            begun = (k for k in _places(rest, reduce)
                     if begins[schedule.name(rest[k % len(rest)]), k // len(rest)] >= arrives[schedule.name(reduce)])
            ahead.setdefault(next(begun, _places(rest, reduce)[-1]), []).extend(bundle)
        out.append(_woven(rest, ahead))
    return schedule.with_ranks(out)


def _places(rest: Sequence[Action], reduce: Action) -> list[int]:
    """Where the step of a reduction can go: before which computations of its rank, counted through this pass and the
    next. The last is the first use of the stage."""
    first = next(k for k, a in enumerate(rest) if a.op in COMPUTE and a.stage == reduce.stage)
    return [k for k in range(rest.index(reduce), len(rest) + first + 1) if rest[k % len(rest)].op in COMPUTE]


def _woven(rest: Sequence[Action], ahead: dict[int, list[Action]]) -> Iterator[Action]:
    """Put the moved actions before their places. What comes before everything the next pass computes ends this one."""
    start = next(k for k, a in enumerate(rest) if a.op in COMPUTE)
    for k, action in enumerate(rest):
        yield from ahead.get(k, ())
        if k > start:
            yield from ahead.get(k + len(rest), ())
        yield action
    yield from ahead.get(start + len(rest), ())
