"""Passes that say when to send and when to receive."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from course_lib.schedule.action import BACKWARD, COMPUTE, RECEIVES, SENDS, Action, Op, Schedule, ScheduleError


def add_messages(schedule: Schedule) -> Schedule:
    """Send right after what is sent was computed, post each receive right before what needs it.

    Correct, and often a deadlock where nothing is buffered: two neighbours that both send before they receive wait
    for each other. `early_receives` mends that. Raises `ScheduleError` where messages are there already.
    """
    if schedule.has_messages:
        raise ScheduleError("the schedule has sends and receives already; add them to a schedule that has compute only")

    def around(a: Action) -> Iterator[Action]:
        below, above = a.stage - 1 in schedule.boundaries, a.stage in schedule.boundaries
        if below and a.op is Op.F:
            yield Action(Op.RECV_F, a.stage, a.index)
        if above and a.op in BACKWARD:
            yield Action(Op.RECV_B, a.stage, a.index)
        yield a
        if above and a.op is Op.F:
            yield Action(Op.SEND_F, a.stage, a.index)
        if below and a.op in BACKWARD:
            yield Action(Op.SEND_B, a.stage, a.index)

    return schedule.with_ranks([[b for a in actions for b in around(a)] for actions in schedule.ranks])


def early_receives(schedule: Schedule, ahead: int = 0) -> Schedule:
    """Post each receive at the moment at which its peer comes to send, and then `ahead` computations earlier still.

    All ranks are walked through together as if sends were buffered, one action each in turn; where one sends, the
    receive is written down for the other. In that common order no send waits, so none can wait in a circle. Where
    ranks are as fast as each other the receive then comes with the bytes; one computation ahead they can travel
    under it, for one more buffer. Raises `ScheduleError` where compute cannot go on even so, or without messages.
    """
    if schedule.boundaries and not schedule.has_messages:
        raise ScheduleError("there are no receives to place; call add_messages first")
    rest = [deque(a for a in actions if a.op not in RECEIVES) for actions in schedule.ranks]
    out: list[list[Action]] = [[] for _ in rest]
    done: set[Action] = set()

    def turn(rank: int) -> bool:
        """The next action of a rank, and the sends that follow it, if what it takes in is there."""
        actions = rest[rank]
        if not actions or not _has_input(schedule, actions[0], done):
            return False
        moved = 0
        while actions and (not moved or actions[0].op in SENDS):
            action = actions.popleft()
            out[rank].append(action)
            done.add(action)
            moved += 1
            if action.op in SENDS:
                receive = action.partner()
                out[schedule.rank_of[receive.stage]].append(receive)
                done.add(receive)
        return True

    while any(rest):
        moved = [turn(rank) for rank in range(len(rest))]
        if not any(moved):
            rank = next(r for r, actions in enumerate(rest) if actions)
            raise ScheduleError(f"rank {rank} cannot go on at {schedule.name(rest[rank][0])}, whatever is buffered; "
                                "check() says what it waits for")
    return schedule.with_ranks(_ahead(actions, ahead) for actions in out)


def _ahead(actions: list[Action], by: int) -> list[Action]:
    """Every receive `by` computations up, in unchanged order."""
    computes = [k for k, a in enumerate(actions) if a.op in COMPUTE]
    place = {}
    for k, a in enumerate(actions):
        if a.op in RECEIVES:
            behind = [c for c in computes if c < k]
            place[k] = k if by == 0 else behind[-by] - 0.5 if len(behind) >= by else -0.5
    return [a for _, a in sorted(enumerate(actions), key=lambda item: place.get(item[0], item[0]))]


def with_messages(schedule: Schedule) -> Schedule:
    """The schedule as it is where it has messages, else with sends at once and receives one computation ahead:
    what the executor and the simulator do with a schedule that has compute only."""
    if schedule.has_messages or not schedule.boundaries:
        return schedule
    return early_receives(add_messages(schedule), ahead=1)


def _has_input(schedule: Schedule, action: Action, done: set[Action]) -> bool:
    """Does the input, or the gradient of the output, lie on this rank?"""
    if action.op is Op.F and action.stage > 0:
        receive, other, gives = Op.RECV_F, action.stage - 1, {Op.F}
    elif action.op in BACKWARD and action.stage + 1 < schedule.stages:
        receive, other, gives = Op.RECV_B, action.stage + 1, BACKWARD
    else:
        return True
    if schedule.rank_of[other] != schedule.rank_of[action.stage]:
        return Action(receive, action.stage, action.index) in done
    return any(Action(op, other, action.index) in done for op in gives)
