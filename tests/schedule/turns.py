"""Schedules whose turns are placed anywhere, sensibly or not, and a walk that says which of them train well."""

from __future__ import annotations

import random

from course_lib.schedule import Action, Op, Schedule
from course_lib.schedule.action import COMPUTE, LAST_USE, WHOLE
from course_lib.schedule.joint import delay_weights


def placed(bare: Schedule, buckets: int, draw: random.Random) -> Schedule:
    """What a stage does in its turn, in some order, each anywhere on the circle where the order allows it; some stages
    are also, or only, gathered between their uses."""
    late = delay_weights(bare, draw.randrange(3))
    numbered = late.with_ranks(late.ranks, [buckets] * bare.stages)
    ranks = []
    for rank, actions in enumerate(numbered.ranks):
        out = list(actions)
        for stage in numbered.stages_of(rank):
            _place(out, stage, buckets, draw)
        ranks.append(out)
    return numbered.with_ranks(ranks)


def _place(out: list[Action], stage: int, buckets: int, draw: random.Random) -> None:
    parts = draw.choice([[WHOLE], list(range(buckets))])
    turn = [Action(op, stage, part) for part in parts for op in (Op.STEP, Op.GATHER)]
    reduced = [Action(Op.REDUCE, stage, b) for b in range(buckets)]
    between = draw.choice(["", "", "too", "only"])
    if between == "only":
        turn = [a for a in turn if a.op is Op.STEP]
    else:
        turn.insert(0 if draw.random() < 0.7 else draw.randrange(len(turn) + 1), Action(Op.FREE, stage))
    if draw.random() < 0.2:
        draw.shuffle(turn)
    ends = draw.randrange(len(turn) + 1)
    if between:
        first, last = _uses(out, stage)
        at = draw.randint(first + 1, last)
        out[at:at] = [Action(Op.FREE, stage), *(Action(Op.GATHER, stage, part) for part in parts)]
    behind = reduced + turn[:ends]
    if draw.random() < 0.5:  # a stage may be freed before its gradient travels
        behind.sort(key=lambda a: a.op is not Op.FREE)
    at = _uses(out, stage)[1] + 1
    for action in behind:
        at = draw.randint(at, len(out))
        out.insert(at, action)
        at += 1
    at = 0
    for action in turn[ends:]:
        at = draw.randint(at, _uses(out, stage)[0])
        out.insert(at, action)
        at += 1


def _uses(actions: list[Action], stage: int) -> tuple[int, int]:
    places = [k for k, a in enumerate(actions) if a.stage == stage and a.op in COMPUTE]
    return places[0], places[-1]


def wrong(schedule: Schedule, passes: int = 3) -> str:
    """What goes wrong in some passes on end, or "". Everything has a version: the number of steps in it."""
    for rank, actions in enumerate(schedule.ranks):
        whole: dict[tuple[int, int], int] = {}
        _walk(schedule, rank, [a for a in actions if a.op in (Op.GATHER, Op.FREE)], whole, {}, {}, -1)
        shard: dict[tuple[int, int], int] = {}
        reduced: dict[tuple[int, int], int] = {}
        for k in range(passes):
            if fault := _walk(schedule, rank, actions, whole, shard, reduced, k):
                return f"rank {rank}, pass {k}: {fault}"
    return ""


def _walk(schedule: Schedule, rank: int, actions, whole, shard, reduced, k: int) -> str:
    """One pass. `whole` and `shard` are versions by (stage, bucket), `reduced` the pass whose gradient is there."""
    done = dict.fromkeys(schedule.stages_of(rank), 0)
    for a in actions:
        parts = [(a.stage, b) for b in (range(schedule.buckets[a.stage]) if a.index == WHOLE else [a.index])]
        if a.op in COMPUTE:
            if any(whole.get((a.stage, b)) != k for b in range(schedule.buckets[a.stage])):
                return f"{a} with {[whole.get((a.stage, b)) for b in range(schedule.buckets[a.stage])]}"
            done[a.stage] += a.op in LAST_USE
        elif a.op is Op.REDUCE:
            if done[a.stage] < schedule.micro_batches:
                return f"{a} is too early"
            reduced[a.stage, a.index] = k
        elif a.op is Op.STEP:
            for part in parts:
                if k == 0 and part not in reduced:
                    continue  # there is no pass before
                if reduced.pop(part, None) != shard.get(part, 0):
                    return f"{a} without its gradient"
                shard[part] = shard.get(part, 0) + 1
        elif a.op is Op.FREE:
            if k >= 0 and not any(part in whole for part in parts):
                return f"{a} of nothing"
            for part in parts:
                whole.pop(part, None)
        else:
            if k >= 0 and any(part in whole for part in parts):
                return f"{a} again"
            whole |= {part: shard.get(part, 0) for part in parts}
    return ""
