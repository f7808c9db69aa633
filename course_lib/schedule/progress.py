"""Who waits for whom: what an action needs before it can be done, and the order that this leaves."""

from __future__ import annotations

from collections.abc import Iterator

from course_lib.schedule.action import BACKWARD, LAST_USE, RECEIVES, SENDS, Action, Op, Schedule, ScheduleError
from course_lib.schedule.cycle import carried, covers


class Needs:
    """What the actions of one schedule need. A need is another action that must have been done."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.carried = {a for rank in range(len(schedule.ranks)) for a in carried(schedule, rank)}
        self.backward = {(a.stage, a.index): a.op for actions in schedule.ranks for a in actions if a.op in BACKWARD}

    def of(self, action: Action) -> Iterator[Action]:
        """The needs of one action, nearest first.

        With messages, compute needs the send of its input, and a send needs its receive to be posted: bytes have
        no place to stay on the way. Without them, compute needs the compute that it depends on.
        """
        stage, i = action.stage, action.index
        if action.op is Op.F and stage > 0:
            yield from self._from(Action(Op.F, stage - 1, i), Action(Op.RECV_F, stage, i))
        elif action.op in BACKWARD:
            yield Action(Op.F, stage, i)
            if stage + 1 < self.schedule.stages:
                yield from self._from(self._backward(stage + 1, i), Action(Op.RECV_B, stage, i))
        elif action.op is Op.W:
            yield Action(Op.I, stage, i)
        elif action.op in SENDS:
            yield Action(Op.F, stage, i) if action.op is Op.SEND_F else self._backward(stage, i)
            yield action.partner()
        elif action.op is Op.REDUCE:
            yield from (Action(Op.B if self.backward[stage, m] is Op.B else Op.W, stage, m)
                        for m in range(self.schedule.micro_batches))
        elif action.op is Op.STEP and action not in self.carried:
            yield from (Action(Op.REDUCE, stage, b) for b in covers(self.schedule, action)) \
                if self.schedule.buckets else self.of(Action(Op.REDUCE, stage))

    def _backward(self, stage: int, i: int) -> Action:
        return Action(self.backward[stage, i], stage, i)

    def _from(self, compute: Action, receive: Action) -> Iterator[Action]:
        crosses = self.schedule.rank_of[compute.stage] != self.schedule.rank_of[receive.stage]
        if crosses and self.schedule.has_messages:
            yield receive
            yield receive.partner()
        else:
            yield compute


def order(schedule: Schedule) -> list[tuple[int, Action]]:
    """All actions as (rank, action) in an order in which each finds its needs met. Raises `ScheduleError` with the
    cycle where there is none. Every action that is needed must be somewhere in the schedule."""
    needs, done, out = Needs(schedule), set(), []
    at = [0] * len(schedule.ranks)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while at[rank] < len(actions) and done.issuperset(needs.of(actions[at[rank]])):
                out.append((rank, actions[at[rank]]))
                done.add(actions[at[rank]])
                at[rank] += 1
                moved = True
    if len(out) < sum(map(len, schedule.ranks)):
        heads = {rank: actions[at[rank]] for rank, actions in enumerate(schedule.ranks) if at[rank] < len(actions)}
        raise _stuck(schedule, heads, {rank: next(n for n in needs.of(a) if n not in done)
                                       for rank, a in heads.items()})
    return out


def _stuck(schedule: Schedule, heads: dict[int, Action], waits: dict[int, Action]) -> ScheduleError:
    """Follow who waits for whom until a rank comes up again; name the ranks in between."""
    path = [min(heads)]
    while (nxt := schedule.rank_of[waits[path[-1]].stage]) not in path:
        path.append(nxt)
    ring = path[path.index(nxt):]
    parts = []
    for rank in ring:
        head, need = heads[rank], waits[rank]
        other = schedule.rank_of[need.stage]
        what = f"rank {other} to {'post ' if need.op in RECEIVES else 'do '}{schedule.name(need)}"
        if other == rank:
            what = f"{schedule.name(need)}, which comes later on the same rank"
        parts.append(f"rank {rank} stands at {schedule.name(head)} (action {schedule.ranks[rank].index(head)}) "
                     f"and waits for {what}")
    hint = ""
    if any(heads[r].op in SENDS for r in ring) and len(ring) > 1:
        hint = " A send goes on once its receive is posted: post the receive earlier (early_receives)."
    return ScheduleError(f"the schedule stops: {'; '.join(parts)}. Nobody can move.{hint}",
                         [(rank, heads[rank]) for rank in ring])


def live(schedule: Schedule, rank: int) -> list[int]:
    """Activations that a rank keeps after each of its actions: micro-batches times stages whose forward is done and
    whose backward (B, or W where it is split) is not."""
    counts, now = [], 0
    for action in schedule.ranks[rank]:
        now += (action.op is Op.F) - (action.op in LAST_USE)
        counts.append(now)
    return counts
