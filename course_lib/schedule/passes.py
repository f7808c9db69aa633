"""Passes: schedule in, schedule out. Each changes one thing and keeps everything else in order.

The usual order is compute, then gathers and reductions, then messages:
`early_receives(add_messages(add_reductions(add_gathers(split_backward(one_f_one_b(4, 8))))))`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from course_lib.schedule.action import COMPUTE, LAST_USE, SENDS, Action, Op, Schedule, ScheduleError


def split_backward(schedule: Schedule) -> Schedule:
    """Each B becomes I and W, with the send of the input's gradient between them: the stage before need not wait
    for W. Later passes may move W on."""

    def split(actions: Sequence[Action]) -> Iterator[Action]:
        waiting: list[Action] = []
        for a in actions:
            if waiting and a.op not in SENDS:
                yield waiting.pop()
            if a.op is Op.B:
                waiting.append(Action(Op.W, a.stage, a.index))
                yield Action(Op.I, a.stage, a.index)
            else:
                yield a
        yield from waiting

    return schedule.with_ranks(split(actions) for actions in schedule.ranks)


def add_gathers(schedule: Schedule, at_once: int = 2) -> Schedule:
    """Gather the parameters of a stage before they are used and free them after, keeping those of the `at_once` stages
    that come next on the rank: what is gathered beyond the first is fetched ahead. ZeRO-3 pays for each gather.
    Raises `ScheduleError` for `at_once` below 1 or gathers that are there already."""
    _refuse(schedule, Op.GATHER)
    if at_once < 1:
        raise ScheduleError(f"at_once={at_once}: a stage that computes has its parameters gathered; give 1 or more")
    return schedule.with_ranks(_gathered(actions, at_once) for actions in schedule.ranks)


def _gathered(actions: Sequence[Action], at_once: int) -> Iterator[Action]:
    held: set[int] = set()
    for k, action in enumerate(actions):
        if action.op in COMPUTE:
            coming = list(dict.fromkeys(a.stage for a in actions[k:] if a.op in COMPUTE))[:at_once]
            yield from (Action(Op.FREE, s) for s in sorted(held - set(coming)))
            yield from (Action(Op.GATHER, s) for s in coming if s not in held)
            held = set(coming)
        yield action
    yield from (Action(Op.FREE, s) for s in sorted(held))


def add_reductions(schedule: Schedule, buckets: int | Sequence[int] = 1) -> Schedule:
    """Reduce the gradient of a stage over its replicas, in `buckets` parts (one number, or one a stage), as soon as
    the last backward of the stage is done. Raises `ScheduleError` where there are reductions already."""
    _refuse(schedule, Op.REDUCE)
    each = [buckets] * schedule.stages if isinstance(buckets, int) else list(buckets)

    def reduced(actions: Sequence[Action]) -> Iterator[Action]:
        last = {a.stage: k for k, a in enumerate(actions) if a.op in LAST_USE}
        due: list[Action] = []
        for k, a in enumerate(actions):
            if a.op not in SENDS:
                yield from due
                due = []
            yield a
            if last.get(a.stage) == k:
                due = [Action(Op.REDUCE, a.stage, b) for b in range(each[a.stage])]
        yield from due

    # the numbers first: they are refused by name where they do not fit the stages
    numbered = schedule.with_ranks(schedule.ranks, each)
    return numbered.with_ranks(reduced(actions) for actions in schedule.ranks)


def add_steps(schedule: Schedule) -> Schedule:
    """The optimizer of each stage, when its rank has done all else. Raises `ScheduleError` where there are steps."""
    _refuse(schedule, Op.STEP)
    return schedule.with_ranks((*actions, *(Action(Op.STEP, s) for s in schedule.stages_of(rank)))
                               for rank, actions in enumerate(schedule.ranks))


def move_earlier(schedule: Schedule, op: Op, by: int | None = None, cap: int | None = None) -> Schedule:
    """Start every gather or reduction up to `by` computations earlier (as early as can be by default).

    A gather stays behind the `free` and the step of its stage and never makes more than `cap` stages gathered at once.
    A reduction stays behind the last backward of its stage. Collectives keep their order, because all replicas issue
    them in it.
    """
    return schedule.with_ranks(_moved(actions, op, -1, by, cap) for actions in schedule.ranks)


def move_later(schedule: Schedule, op: Op, by: int | None = None, cap: int | None = None) -> Schedule:
    """Start every gather or reduction up to `by` computations later (as late as can be by default).

    A gather stays before the first use of its stage. A reduction stays before the step of its stage, and no more than
    `cap` stages wait at once with a complete gradient that is not reduced. Collectives keep their order.
    """
    return schedule.with_ranks(_moved(actions, op, 1, by, cap) for actions in schedule.ranks)


def _moved(actions: Sequence[Action], op: Op, way: int, by: int | None, cap: int | None) -> list[Action]:
    if op not in (Op.GATHER, Op.REDUCE):
        raise ScheduleError(f"{op.value} cannot be moved; move gathers (Op.GATHER) or reductions (Op.REDUCE)")
    items = list(actions)
    places = [k for k, a in enumerate(items) if a.op is op]
    for k in places if way < 0 else reversed(places):
        passed = 0
        while 0 <= k + way < len(items) and not _blocks(items[k + way], items[k], way):
            passed += items[k + way].op in COMPUTE
            if by is not None and passed > by:
                break
            items[k], items[k + way] = items[k + way], items[k]
            if cap is not None and _held(items, op) > cap:
                items[k], items[k + way] = items[k + way], items[k]
                break
            k += way
    return items


def _blocks(other: Action, moving: Action, way: int) -> bool:
    if other.op in (Op.GATHER, Op.REDUCE):
        return True
    if other.stage != moving.stage:
        return False
    if moving.op is Op.GATHER:
        return other.op in (Op.FREE, Op.STEP) if way < 0 else other.op in COMPUTE
    return other.op in LAST_USE if way < 0 else other.op is Op.STEP


def _held(actions: Sequence[Action], op: Op) -> int:
    """What a cap counts: the most stages gathered at once, or complete and not reduced."""
    if op is Op.GATHER:
        begins = {k for k, a in enumerate(actions) if a.op is Op.GATHER}
        ends = {k for k, a in enumerate(actions) if a.op is Op.FREE}
    else:
        begins = set({a.stage: k for k, a in enumerate(actions) if a.op in LAST_USE}.values())
        ends = set({a.stage: k for k, a in enumerate(actions) if a.op is Op.REDUCE}.values())
    now = peak = 0
    for k in range(len(actions)):
        now += (k in begins) - (k in ends)
        peak = max(peak, now)
    return peak


def _refuse(schedule: Schedule, op: Op) -> None:
    if any(a.op is op for actions in schedule.ranks for a in actions):
        raise ScheduleError(f"the schedule has {op.value} actions already; start from one without")
