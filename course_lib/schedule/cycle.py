"""Passes one after the other: what the end of one leaves for the beginning of the next.

A rank's list is a circle. From the last use of a stage in one pass to its first use in the next lies its *turn*: there
its gradient is reduced, the optimizer steps and parameters are gathered, bucket by bucket. A step at the front of the
list, before the first use of its stage, is *carried*: it belongs to the gradient of the pass before. A gather after the
last `free` of its stage is *held over* for the pass that follows. In each turn what was gathered is freed, and gathered
again behind the step; where in the turn it is freed is open.
"""

from __future__ import annotations

from collections.abc import Iterator

from course_lib.schedule.action import COMPUTE, WHOLE, Action, Op, Schedule, ScheduleError


def covers(schedule: Schedule, action: Action) -> tuple[int, ...]:
    """The buckets of a gather, a free or a step; `(WHOLE,)` where the schedule names no buckets."""
    if action.index != WHOLE:
        return (action.index,)
    return tuple(range(schedule.buckets[action.stage])) if schedule.buckets else (WHOLE,)


def uses(schedule: Schedule, stage: int) -> tuple[int, int]:
    """Where in its rank's list a stage computes first and last. The stage must compute."""
    places = [k for k, a in enumerate(schedule.ranks[schedule.rank_of[stage]]) if a.stage == stage and a.op in COMPUTE]
    return places[0], places[-1]


def carried(schedule: Schedule, rank: int) -> tuple[Action, ...]:
    """The steps of a rank that belong to the pass before, in the order of its list."""
    if not schedule.buckets:
        return ()
    used: set[int] = set()
    out = []
    for action in schedule.ranks[rank]:
        used |= {action.stage} if action.op in COMPUTE else set()
        if action.op is Op.STEP and action.stage not in used:
            out.append(action)
    return tuple(out)


def held_over(schedule: Schedule, rank: int) -> set[tuple[int, int]]:
    """The (stage, bucket) that are gathered when a pass of a rank ends, for the next one."""
    freed = {a.stage: k for k, a in enumerate(schedule.ranks[rank]) if a.op is Op.FREE}
    return {(a.stage, part) for k, a in enumerate(schedule.ranks[rank])
            if a.op is Op.GATHER and k > freed.get(a.stage, k) for part in covers(schedule, a)}


def turn(schedule: Schedule, stage: int) -> list[Action]:
    """The stage's own actions from its last use to its first use in the next pass, in order."""
    actions = schedule.ranks[schedule.rank_of[stage]]
    first, last = uses(schedule, stage)
    return [a for a in (*actions[last + 1:], *actions[:first]) if a.stage == stage]


def check_turns(schedule: Schedule) -> None:
    """Prove that each bucket is stepped once, if any is, and that what is gathered for the next pass is what the
    optimizer has made of it. Raises `ScheduleError`."""
    steps = {a for actions in schedule.ranks for a in actions if a.op is Op.STEP}
    for stage, rank in enumerate(schedule.rank_of):
        turned = turn(schedule, stage)
        early = next((a for a in schedule.ranks[rank] if a in steps and a.stage == stage and a not in turned), None)
        if early is not None:
            raise ScheduleError(f"rank {rank} does {schedule.name(early)} while stage {stage} is in use, before its "
                                "gradient is complete; step after its last use, or before its first use in the next "
                                "pass")
        mine = [part for a in schedule.ranks[rank] if a in steps and a.stage == stage for part in covers(schedule, a)]
        for part in covers(schedule, Action(Op.STEP, stage)) if steps else ():
            if mine.count(part) != 1:
                raise ScheduleError(f"rank {rank} steps {_part(stage, part)} {mine.count(part)} times; an optimizer "
                                    "steps once a pass, whole or bucket by bucket")
        _fresh(schedule, rank, stage, bool(steps))


def _fresh(schedule: Schedule, rank: int, stage: int, steps: bool) -> None:
    """A pass begins with what was gathered behind the step, which without steps in the lists is between two passes."""
    turned, first = turn(schedule, stage), uses(schedule, stage)[0]
    end = len(turned) - sum(a.stage == stage for a in schedule.ranks[rank][:first])
    stepped: set[int] = set()
    kept = {part for s, part in held_over(schedule, rank) if s == stage}
    old = set(kept)
    for k, action in enumerate(turned):
        if action.op is Op.STEP:
            stepped |= set(covers(schedule, action))
        elif action.op is Op.GATHER:
            for part in covers(schedule, action):
                if steps and part not in stepped:
                    raise ScheduleError(f"rank {rank} does {schedule.name(action)} before the step of "
                                        f"{_part(stage, part)}, so that the next pass would compute with the old "
                                        "parameters; put the step first")
                if not steps and k < end and part in kept:
                    raise ScheduleError(f"rank {rank} does {schedule.name(action)} at the end of the pass, but the "
                                        "optimizer steps after it; gather at the beginning, or add_steps")
                old.discard(part)
    if old:
        raise ScheduleError(f"rank {rank} does {schedule.name(schedule.ranks[rank][first])} with the old parameters of "
                            f"{_part(stage, min(old))}, which it gathered before the step and keeps; between the last "
                            "use of a stage and its next, free it, and gather it again behind the step")


def _part(stage: int, part: int) -> str:
    return f"stage {stage}" if part == WHOLE else f"bucket {part} of stage {stage}"


def held(schedule: Schedule, rank: int) -> Iterator[tuple[int, Action, set[tuple[int, int]]]]:
    """(place, action, what is gathered before it) along a rank's list, beginning with what is held over."""
    now = held_over(schedule, rank)
    for k, action in enumerate(schedule.ranks[rank]):
        yield k, action, now
        if action.op is Op.GATHER:
            now = now | {(action.stage, part) for part in covers(schedule, action)}
        elif action.op is Op.FREE:
            now = {(stage, part) for stage, part in now if stage != action.stage}
