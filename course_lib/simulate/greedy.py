"""Build a joint schedule from nothing: let every rank and every wire do, at each moment, the most urgent thing it can.

Backwards go before forwards, forwards breadth-first, and W only where a rank would be idle, so that many are left for
the end. Those of the stage that the next pass needs first come first there: under the others it is reduced, stepped and
gathered (its *turn*, see `schedule.cycle`), and under the forwards of the next pass they are. Breadth-first because
stages then need their parameters as late, and have done their work as early, as can be (Lamy-Poirier, "Breadth-First
Pipeline Parallelism", 2022). Several passes are built; one from the middle is returned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from course_lib.schedule.action import COMPUTE, LAST_USE, Action, Op, Schedule, ScheduleError
from course_lib.schedule.joint import naive
from course_lib.simulate.pipeline import Costs

_PASSES = 5
_NEVER = 1 << 62


def greedy(placement: Schedule, costs: Costs, buckets: int | Sequence[int] = 2,
           memory: int | None = None) -> Schedule:
    """For the stages and micro-batches of `placement`, of which the order does not matter. A rank that keeps `memory`
    activations (micro-batches times stages) does no F before another W or B. Compute, reductions, steps and gathers;
    messages are for `with_messages`. Raises `ScheduleError` where breadth-first needs more than `memory`. Passes that
    do not settle give a schedule that `check` refuses."""
    full = naive(placement, buckets)
    ranks = [_Rank(full, costs, rank, memory) for rank in range(len(full.ranks))]
    board: dict[tuple[int, Action], int] = {}
    while todo := [r for r in ranks if r.at < _PASSES]:
        now = min(r.now for r in todo)
        idle = [r for r in todo if r.now == now and not r.act(board)]
        if len(idle) == sum(r.now == now for r in todo):
            later = [t for r in todo for t in (r.now, *r.coming(board)) if now < t < _NEVER]
            if not later:
                raise ScheduleError(f"nobody can go on in pass {min(r.at for r in todo)}: memory={memory} activations "
                                    "are too few to go breadth-first; give more, or None")
            for rank in idle:
                rank.now = min(later)
    return full.with_ranks(rank.window(_PASSES - 2) for rank in ranks)


class _Rank:
    """What one rank has done and can do. `board` tells all ranks when what a stage gives arrives where it goes."""

    def __init__(self, full: Schedule, costs: Costs, rank: int, memory: int | None) -> None:
        self.full, self.costs, self.rank, self.memory = full, costs, rank, memory
        self.live = 0  # activations
        self.stages = full.stages_of(rank)
        self.now = self.wire = self.at = 0  # device free, wire free, pass that is under way
        self.done: set[tuple[int, Action]] = set()
        self.log: list[tuple[int, Action]] = []
        self.left = self._compute()
        self.gathered: dict[tuple[int, int], int] = defaultdict(int)  # (pass, stage): when its parameters are there
        self.reduced: dict[tuple[int, Action], int] = {}  # step of a pass: when its gradient is there
        self.ready: list[tuple[int, Action]] = []  # collectives that can be issued

    def _compute(self) -> set[Action]:
        return {a for a in self.full.ranks[self.rank] if a.op in COMPUTE}

    def act(self, board: dict[tuple[int, Action], int]) -> bool:
        """Do the most urgent thing that can begin now. False where there is none."""
        there = [key for key, t in self.reduced.items() if t <= self.now]
        if there:
            self._step(*min(there, key=lambda key: (key[0], key[1].stage)))
            return True
        choice = min((a for a in self.left if self._begins(a, board) <= self.now), key=self._urgency, default=None)
        if choice is None:
            return self._issue(self.now + 1)
        took = self.costs.action_ns(self.full, choice)
        first = len(self.left) == len(self._compute())
        self._issue(self.now + (0 if first else took), every=first)
        self.log.append((self.at, choice))
        self.left.remove(choice)
        self.done.add((self.at, choice))
        self.live += (choice.op is Op.F) - (choice.op in LAST_USE)
        self.now += took
        self._tell(choice, board)
        if choice.op in LAST_USE and not any(a.stage == choice.stage and a.op is choice.op for a in self.left):
            self.ready += [(self.at, Action(Op.REDUCE, choice.stage, b))
                           for b in range(self.full.buckets[choice.stage])]
        if not self.left:
            self.at += 1
            self.left = self._compute()
        return True

    def coming(self, board: dict[tuple[int, Action], int]) -> list[int]:
        """When something that this rank waits for is known to be there."""
        return [*self.reduced.values(), *(self._begins(a, board) for a in self.left), *([self.wire] * bool(self.ready))]

    def window(self, k: int) -> list[Action]:
        """Everything from the first compute of pass k to that of the next, and what is freed."""
        begins = [next(n for n, (at, a) in enumerate(self.log) if at == p and a.op in COMPUTE) for p in (k, k + 1)]
        out: list[Action] = []
        inside = [a for _, a in self.log[begins[0]:begins[1]]]
        last = {a.stage: n for n, a in enumerate(inside) if a.op in COMPUTE}
        for n, action in enumerate(inside):
            out.append(action)
            if last[action.stage] == n:
                out.append(Action(Op.FREE, action.stage))
        return out

    def _urgency(self, action: Action) -> tuple:
        order = {Op.I: 0, Op.B: 0, Op.F: 1, Op.W: 2}[action.op]
        if action.op is Op.W:
            return order, action.stage, action.index
        return order, action.stage if action.op is Op.F else -action.stage, action.index

    def _begins(self, action: Action, board: dict[tuple[int, Action], int]) -> int:
        """When what it needs is there; far away where that is not known yet."""
        if action.op is Op.W:
            return 0 if (self.at, Action(Op.I, action.stage, action.index)) in self.done else _NEVER
        if action.op is Op.F and self._full():
            return _NEVER
        if action.op is Op.F:
            gathered = self.gathered.get((self.at, action.stage), 0 if self.at == 0 else _NEVER)
            return max(gathered, board.get((self.at, action), _NEVER) if action.stage else 0)
        if (self.at, Action(Op.F, action.stage, action.index)) not in self.done:
            return _NEVER
        return board.get((self.at, action), _NEVER) if action.stage + 1 < self.full.stages else 0

    def _full(self) -> bool:
        return self.memory is not None and self.live >= self.memory

    def _tell(self, action: Action, board: dict[tuple[int, Action], int]) -> None:
        if action.op is Op.W:
            return
        other = action.stage + (1 if action.op is Op.F else -1)
        if not 0 <= other < self.full.stages:
            return
        boundary = min(action.stage, other)
        travels = sum(self.costs.message(boundary, self.full.stages)[1:]) if boundary in self.full.boundaries else 0
        board[self.at, Action(action.op, other, action.index)] = self.now + travels

    def _step(self, k: int, step: Action) -> None:
        del self.reduced[k, step]
        self.log.append((k, step))
        self.now += self.costs.action_ns(self.full, step)
        self.ready.append((k, Action(Op.GATHER, step.stage, step.index)))
        self._issue(self.now)

    def _issue(self, until: int, every: bool = False) -> bool:
        """Hand collectives to the wire while it would rest before `until`: of the stage first that is needed first.
        A reduction does not cross into the next pass; `every` one is issued before that begins. Was there any?"""
        self.ready.sort(key=lambda item: (item[0], item[1].stage, item[1].op is Op.GATHER, item[1].index))
        rest = []
        for k, action in self.ready:
            if self.wire > until and not (every and action.op is Op.REDUCE):
                rest.append((k, action))
                continue
            self.log.append((k, action))
            self.wire = max(self.wire, self.now) + self.costs.action_ns(self.full, action)
            if action.op is Op.REDUCE:
                self.reduced[k, Action(Op.STEP, action.stage, action.index)] = self.wire
            else:
                self._arrives(k, action)
        some, self.ready = len(rest) < len(self.ready), rest
        return some

    def _arrives(self, k: int, gather: Action) -> None:
        """The stage can compute again when the last of its buckets is gathered."""
        issued = sum(at == k and a.op is Op.GATHER and a.stage == gather.stage for at, a in self.log)
        if issued == self.full.buckets[gather.stage]:
            self.gathered[k + 1, gather.stage] = self.wire
