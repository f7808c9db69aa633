"""Build a joint schedule from nothing: let every rank and every wire do, at each moment, the most urgent thing it can.

Backwards go before forwards, and forwards breadth-first, because stages then need their parameters as late, and have
done their work as early, as can be (Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022). Between the last use of
a stage and its first in the next pass lies its *turn*: reduce, step, gather (`schedule.cycle`). W decide what turns
travel under. Some are kept for the very end: under them the stage has its turn that is needed first. Where some are
kept, those of other stages are prompt: they follow their stage's backwards, so that its turn is over by then. How many
are kept, and of which stage, is tried. Several passes are built for each; one from the middle is taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from course_lib.schedule.action import COMPUTE, LAST_USE, Action, Op, Schedule, ScheduleError
from course_lib.schedule.joint import naive
from course_lib.simulate.pipeline import Costs, period

_PASSES = 4
_NEVER = 1 << 62


def greedy(placement: Schedule, costs: Costs, buckets: int | Sequence[int] = 2,
           memory: int | None = None) -> Schedule:
    """For the stages and micro-batches of `placement`, of which the order does not matter. A rank that keeps `memory`
    activations (micro-batches times stages) does no F before another W or B. Compute, reductions, steps and gathers;
    messages are for `with_messages`. Raises `ScheduleError` where breadth-first needs more than `memory`."""
    full = naive(placement, buckets)
    v = max(len(full.stages_of(rank)) for rank in range(len(full.ranks)))
    best, least, failed = None, 0.0, None
    some = range(-(-full.micro_batches // 2), full.micro_batches * (v - 1) + 1, -(-full.micro_batches // 2))
    for keep, at, strict in [(0, 1, True), *product(some, range(1, v), (False, True))]:
        try:
            made = _built(full, costs, _Rule(memory, keep, at, strict))
            took = period(made, costs)
        except ScheduleError as error:  # also where passes do not settle into one that can be repeated
            failed = error
            continue
        if best is None or took < least:
            best, least = made, took
    if best is None:
        raise failed
    return best


class _Rule(NamedTuple):
    """`keep` W are kept for the end, first those of the rank's stage number `at`; then the others are prompt. `strict`:
    no stage begins its backwards before the rank has done those of the stages behind it, unless it would be idle."""

    memory: int | None
    keep: int
    at: int
    strict: bool


def _built(full: Schedule, costs: Costs, rule: _Rule) -> Schedule:
    ranks = [_Rank(full, costs, rank, rule) for rank in range(len(full.ranks))]
    board: dict[tuple[int, Action], int] = {}
    while todo := [r for r in ranks if r.at < _PASSES]:
        now = min(r.now for r in todo)
        idle = [r for r in todo if r.now == now and not r.act(board)]
        if len(idle) == sum(r.now == now for r in todo):
            later = [t for r in todo for t in (r.now, *r.coming(board)) if now < t < _NEVER]
            if not later:
                raise ScheduleError(f"nobody can go on in pass {min(r.at for r in todo)}: memory={rule.memory} "
                                    "activations are too few to go breadth-first; give more, or None")
            for rank in idle:
                rank.now = min(later)
    return full.with_ranks(rank.window(_PASSES - 2) for rank in ranks)


class _Rank:
    """What one rank has done and can do. `board` tells all ranks when what a stage gives arrives where it goes."""

    def __init__(self, full: Schedule, costs: Costs, rank: int, rule: _Rule) -> None:
        self.full, self.costs, self.rank, self.rule = full, costs, rank, rule
        self.live = 0  # activations
        self.stages = full.stages_of(rank)
        self.now = self.wire = self.at = 0  # device free, wire free, pass that is under way
        self.done: set[tuple[int, Action]] = set()
        self.log: list[tuple[int, Action]] = []
        self.all = frozenset(a for a in full.ranks[rank] if a.op in COMPUTE)
        self.left = set(self.all)
        latest = [Action(Op.W, s, i) for s in (*self.stages[rule.at:], *self.stages[1:rule.at])
                  for i in reversed(range(full.micro_batches))]
        self.kept = set(latest[:rule.keep])
        self.gathered: dict[tuple[int, int], int] = defaultdict(int)  # (pass, stage): when its parameters are there
        self.reduced: dict[tuple[int, Action], int] = {}  # step of a pass: when its gradient is there
        self.ready: list[tuple[int, Action]] = []  # collectives that can be issued

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
        first = len(self.left) == len(self.all)
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
            self.left = set(self.all)
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
        """Least first: backwards of the last stage, with its W if they are prompt, then of the one before; forwards of
        the first stage; W that fill gaps; kept ones."""
        if action.op is Op.F:
            return 1, action.stage, action.index
        if action.op is not Op.W:
            overtakes = self.rule.strict and any(a.op is action.op and a.stage > action.stage for a in self.left)
            return 1.5 if overtakes else 0, -action.stage, 0, action.index
        if action in self.kept:
            return 3, action.stage, action.index
        if self.rule.keep and action.stage != self.stages[0]:
            return 0, -action.stage, 1, action.index
        return 2, action.stage, action.index

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
        return self.rule.memory is not None and self.live >= self.rule.memory

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
