"""Can this schedule run? Proved before it does: what is missing, what waits in a circle, what it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from course_lib.schedule.action import (
    COMPUTE,
    LAST_USE,
    MESSAGES,
    SENDS,
    Action,
    Op,
    Schedule,
    ScheduleError,
)
from course_lib.schedule.cycle import check_turns, covers, held
from course_lib.schedule.progress import live, order


@dataclass(frozen=True)
class Facts:
    """What `check` found about a schedule that can run. Each tuple has one entry a rank: `peak_activations` in
    micro-batches times stages, `peak_gathered` in stages whose parameters are gathered at once, `sends` in
    messages. `order` is one order of all actions, as (rank, action), in which each finds what it needs."""

    order: tuple[tuple[int, Action], ...]
    peak_activations: tuple[int, ...]
    peak_gathered: tuple[int, ...]
    sends: tuple[int, ...]


def check(schedule: Schedule) -> Facts:
    """Prove that a schedule does all of its work and always goes on, also where nothing is buffered on the way.

    Every micro-batch goes once forward and once backward (B, or I and W) through every stage. Sends and receives
    match one to one and, between two ranks, in order. A send goes on only when its receive has been posted. A gradient
    is reduced once a bucket and window, after the last backward of its stage. Parameters that are gathered at all
    are gathered when they are used, and as the optimizer left them, also where one pass does what is left of the one
    before (`cycle`). Without messages, only the order of compute is proved.

    Raises `ScheduleError`, which says what is wrong and, where ranks wait for each other, which action on which
    rank waits for what.
    """
    _once(schedule)
    _complete(schedule)
    _matched(schedule)
    _reduced(schedule)
    check_turns(schedule)
    gathered = tuple(_gathered(schedule, rank) for rank in range(len(schedule.ranks)))
    found = tuple(order(schedule))
    return Facts(found, tuple(max(live(schedule, rank), default=0) for rank in range(len(schedule.ranks))), gathered,
                 tuple(sum(a.op in SENDS for a in actions) for actions in schedule.ranks))


def _once(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.ranks):
        for action, times in Counter(actions).items():
            if times > 1 and action.op not in (Op.GATHER, Op.FREE):
                raise ScheduleError(f"rank {rank} has {schedule.name(action)} {times} times; do it once")


def _complete(schedule: Schedule) -> None:
    """Each stage does all the compute of each micro-batch."""
    there = {a for actions in schedule.ranks for a in actions}
    for stage, rank in enumerate(schedule.rank_of):
        for i in range(schedule.micro_batches):
            has = {op for op in COMPUTE if Action(op, stage, i) in there}
            if has not in ({Op.F, Op.B}, {Op.F, Op.I, Op.W}):
                want = [Op.F, Op.I, Op.W] if has & {Op.I, Op.W} else [Op.F, Op.B]
                lacks = [schedule.name(Action(op, stage, i)) for op in want if op not in has]
                what = f"lacks {' and '.join(lacks)}" if lacks else "has both B and the I and W that it consists of"
                raise ScheduleError(f"rank {rank} {what} for micro-batch {i} of stage {stage}; each stage does F and "
                                    "then B, or F, I and W, once a micro-batch")


def _matched(schedule: Schedule) -> None:
    """Each message that must cross is sent and received once, and two ranks agree on the order."""
    if not schedule.has_messages:
        return
    there = {a for actions in schedule.ranks for a in actions if a.op in MESSAGES}
    wanted = set(_messages(schedule))
    for action in sorted(wanted ^ there, key=lambda a: (a.stage, a.index, a.op.value)):
        rank = schedule.rank_of[action.stage]
        fault = "lacks" if action in wanted else "has, but nobody takes part in it,"
        raise ScheduleError(f"rank {rank} {fault} {schedule.name(action)}; where two neighbouring stages lie on "
                            "different ranks, each micro-batch is sent and received once in each direction")
    queues: dict[tuple[int, int, bool], list[Action]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for a in actions:
            if a.op in MESSAGES:
                peer = schedule.rank_of[a.partner().stage]
                ends = (rank, peer) if a.op in SENDS else (peer, rank)
                queues.setdefault((*ends, a.op in SENDS), []).append(a)
    for (source, target, sending), sent in queues.items():
        if not sending:
            continue
        for k, (send, receive) in enumerate(zip(sent, queues[source, target, False])):
            if send.partner() != receive:
                raise ScheduleError(f"message {k} from rank {source} to rank {target} is {schedule.name(send)}, but "
                                    f"rank {target} expects {schedule.name(receive)} there; receive in the order in "
                                    "which the peer sends")


def _messages(schedule: Schedule) -> Iterator[Action]:
    for s in schedule.boundaries:
        for i in range(schedule.micro_batches):
            for send in (Action(Op.SEND_F, s, i), Action(Op.SEND_B, s + 1, i)):
                yield send
                yield send.partner()


def _reduced(schedule: Schedule) -> None:
    """Exactly one reduction a bucket and window; `order` finds those that come too early only where they would
    wait, so say it here in plain words."""
    for stage, rank in enumerate(schedule.rank_of):
        actions = schedule.ranks[rank]
        last = max(k for k, a in enumerate(actions) if a.stage == stage and a.op in LAST_USE)
        for bucket in range(schedule.buckets[stage] if schedule.buckets else 0):
            reduce = Action(Op.REDUCE, stage, bucket)
            if reduce not in actions:
                raise ScheduleError(f"rank {rank} never reduces bucket {bucket} of stage {stage}, so its replicas "
                                    f"would drift apart; add {schedule.name(reduce)} after "
                                    f"{schedule.name(actions[last])}")
            if actions.index(reduce) < last:
                raise ScheduleError(f"rank {rank} does {schedule.name(reduce)} before {schedule.name(actions[last])}, "
                                    "whose share of the gradient would never be reduced; move it behind")


def _gathered(schedule: Schedule, rank: int) -> int:
    """The most stages gathered at once. 0 where parameters are never gathered: they are always there."""
    gathers = any(a.op in (Op.GATHER, Op.FREE) for actions in schedule.ranks for a in actions)
    freed = {a.stage for a in schedule.ranks[rank] if a.op is Op.FREE}
    if never := {a.stage for a in schedule.ranks[rank] if a.op is Op.GATHER} - freed:
        raise ScheduleError(f"rank {rank} never frees stage {min(never)}, which it gathered; add "
                            f"{schedule.name(Action(Op.FREE, min(never)))} after its last use")
    peak, dropped = 0, dict[int, str]()
    for k, action, now in held(schedule, rank):
        stage = action.stage
        parts = {(stage, part) for part in covers(schedule, action)} if action.op in (Op.GATHER, Op.FREE) else set()
        if (action.op is Op.GATHER and parts & now) or (action.op is Op.FREE and not parts & now):
            state = "gathered already" if action.op is Op.GATHER else "not gathered"
            raise ScheduleError(f"rank {rank} has {schedule.name(action)} as action {k}, but stage {stage} is {state}")
        whole = {(stage, part) for part in covers(schedule, Action(Op.GATHER, stage))}
        if gathers and action.op in COMPUTE and not whole <= now:
            gather = schedule.name(Action(Op.GATHER, stage))
            advice = f": {dropped[stage]} has dropped them; put {gather} between the two" if stage in dropped else \
                f"; put {gather} before it"
            raise ScheduleError(f"rank {rank} does {schedule.name(action)} (action {k}) with parameters that are not "
                                f"gathered{advice}")
        if action.op is Op.FREE:
            dropped[stage] = f"{schedule.name(action)} (action {k})"
        peak = max(peak, len({s for s, _ in now | (parts if action.op is Op.GATHER else set())}))
    return peak
