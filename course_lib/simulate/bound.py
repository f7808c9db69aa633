"""What no joint schedule can beat: the longest of the paths that every valid one contains.

The placement of stages, the number of micro-batches, the buckets and the costs are given; the order is free. In a long
run of passes, each update takes at least

* what a rank's device computes in it, and what its wire carries (`device`, `wire`);
* one turn of each stage (`stage`): from the first F of a pass to the first F of the next, its first micro-batches go
  on to some later stage, all are done there, the last comes back, its W, then its reductions, a step and its gathers on
  one wire.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from course_lib.schedule.action import COMPUTE, Op, Schedule
from course_lib.schedule.cycle import turn
from course_lib.simulate.pipeline import Costs


class Bound(NamedTuple):
    """Seconds of an update, and which path it is, for example `device of rank 1` or `stage 0 through stage 3`."""

    seconds: float
    path: str


def bound(schedule: Schedule, costs: Costs) -> Bound:
    """The largest of all lower bounds of `period(schedule, costs)`. Of the schedule only what it does counts, not in
    which order. Raises `ValueError` for costs that do not fit."""
    return max(bounds(schedule, costs))


def bounds(schedule: Schedule, costs: Costs) -> list[Bound]:
    """Every lower bound, for a picture of which resource is short."""
    return [Bound(ns / 1e9, path) for ns, path in _all(schedule, costs)]


def _all(schedule: Schedule, costs: Costs) -> Iterator[tuple[int, str]]:
    for rank, actions in enumerate(schedule.ranks):
        for lane, ops in (("device", COMPUTE | {Op.STEP}), ("wire", {Op.REDUCE, Op.GATHER})):
            yield sum(costs.action_ns(schedule, a) for a in actions if a.op in ops), f"{lane} of rank {rank}"
    split = any(a.op is Op.I for actions in schedule.ranks for a in actions)
    for stage in range(schedule.stages):
        back = _turn(schedule, costs, stage)
        for through in range(stage, schedule.stages):
            yield _there_and_back(schedule, costs, stage, through, split) + back, f"stage {stage} through {through}"
        yield schedule.micro_batches * _micro(schedule, costs, stage, split, True) + back, f"stage {stage} by itself"


def _there_and_back(schedule: Schedule, costs: Costs, stage: int, through: int, split: bool) -> int:
    """The first micro-batch reaches `through`, all are done there, the last comes back and is done with."""
    n = schedule.stages
    forward = sum(costs.ns(Op.F, s, n) + _message(schedule, costs, s) for s in range(stage, through))
    backward = sum(costs.ns(Op.I if split else Op.B, s, n) + _message(schedule, costs, s)
                   for s in range(stage, through))
    last = costs.ns(Op.W, stage, n) if split else 0
    return forward + schedule.micro_batches * _micro(schedule, costs, through, split, False) + backward + last


def _micro(schedule: Schedule, costs: Costs, stage: int, split: bool, weights: bool) -> int:
    """What one micro-batch computes on a stage; without `weights` W may come later, where it is a part of its own."""
    n = schedule.stages
    if not split:
        return costs.ns(Op.F, stage, n) + costs.ns(Op.B, stage, n)
    return costs.ns(Op.F, stage, n) + costs.ns(Op.I, stage, n) + weights * costs.ns(Op.W, stage, n)


def _message(schedule: Schedule, costs: Costs, boundary: int) -> int:
    if boundary not in schedule.boundaries:
        return 0
    _, latency, transfer = costs.message(boundary, schedule.stages)
    return latency + transfer


def _turn(schedule: Schedule, costs: Costs, stage: int) -> int:
    """From the last use of a stage to its next: all of its reductions, the step of a bucket, and its gathers, of which
    those of other buckets may travel while the last one steps."""
    ns = {op: [costs.action_ns(schedule, a) for a in turn(schedule, stage) if a.op is op]
          for op in (Op.REDUCE, Op.STEP, Op.GATHER)}
    wire = sum(ns[Op.REDUCE]) + sum(ns[Op.GATHER])
    if not ns[Op.STEP]:
        return wire
    return max(wire, sum(ns[Op.REDUCE]) + min(ns[Op.STEP]) + min(ns[Op.GATHER], default=0))
