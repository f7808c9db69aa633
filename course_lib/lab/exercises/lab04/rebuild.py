"""Exercise 4.4: rebuild the order from what was observed.

The learner writes `rebuilt_order(seen, uses, broadcast) -> list[int] | None`; every rank calls it once, after
the first window:

- `seen` lists the ids for which this rank's hook was called in that window, in order. A parameter that is
  used twice is listed twice, and its gradient is complete at the second.
- `uses` maps each id to the number of calls that make its gradient complete.
- `broadcast(value)` gives every rank the value of rank 0. It is a collective: every rank has to call it, as
  often as the others.
- The result is the same on all ranks: all ids in the order in which their gradients were complete on rank 0,
  or None ("keep the order you have") when the window was not complete on rank 0.

The check plays two to four ranks in one process, rank 0 first.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from course_lib.lab.guard import call
from course_lib.lab.model import Row, Verdict, exercise

HINTS = (
    "Two questions, and rank 0 answers both for everybody: is my window complete, and in which order were the "
    "gradients complete? Each rank may compute its own answer, as long as all of them return rank 0's.",
    "Go through `seen` and count the calls of each id. When the count reaches uses[id], put the id into the order. If "
    "the order has all ids at the end, the window was complete. Make it None otherwise. Then call broadcast, on every "
    "path through your function.",
    "calls, order = Counter(), []; for index in seen: add 1 to calls[index]; if calls[index] == uses[index], append "
    "index to order. Then: return broadcast(order if len(order) == len(uses) else None). There is no other return.",
)

MISTAKES = {
    "no_result": "Your function returned None although the window was complete. Does it return what broadcast gives?",
    "own_order": "Each rank returns the order that it saw itself. They differ, so bucket 1 of one rank holds other "
    "gradients than bucket 1 of another, and they are added. Return what broadcast gives you.",
    "hangs": "Not every rank calls broadcast. The ranks that do wait for those that do not, or are given the data of a "
    "later collective. Let the call stand where every rank passes, whatever it has seen.",
    "repeats": "A parameter is in your order twice. It has one gradient and one place: that of its last use.",
    "sorts_by_id": "Your order follows the ids, not the calls of the hook. That is the guess you began with; the point "
    "of the first window is to see what really happens.",
    "first_ready": "A parameter that is used twice stands at its first use. Its gradient is complete at the last, and "
    "until then its bucket could not leave, with all those behind it.",
    "turned_around": "`seen` is in the order in which gradients become ready. Turned around, the first bucket holds "
    "what is ready last, and nothing leaves before backward ends.",
    "too_early": "You rebuild from a window that is not complete: a parameter was not used, or not as often as `uses` "
    "says. It has no place in your order, or a wrong one. Return None on all ranks and keep the old order.",
    "decides_alone": "Each rank decides by its own window whether to rebuild. One that missed a gradient keeps the old "
    "order while the others change theirs. Rank 0 decides for all: broadcast its None too.",
}


class Hang(BaseException):
    """A rank waits for a broadcast that rank 0 never makes. No `except Exception` may swallow it."""


class Case(NamedTuple):
    """One window as each rank saw it, and what each made of it."""

    uses: dict[int, int]
    seen: list[list[int]]
    results: list[Any]
    calls: list[int]

    def order(self, rank: int) -> list[int]:
        """The ids in the order in which their gradients were complete on this rank."""
        last = {index: place for place, index in enumerate(self.seen[rank])}
        return sorted(last, key=last.__getitem__)

    def complete(self, rank: int) -> bool:
        return Counter(self.seen[rank]) == Counter(self.uses)

    @property
    def all_complete(self) -> bool:
        return all(map(self.complete, range(len(self.seen))))

    @property
    def expected(self) -> list[int] | None:
        return self.order(0) if self.complete(0) else None

    @property
    def tied(self) -> bool:
        return max(self.uses.values()) > 1

    @property
    def agree(self) -> bool:
        return all(result == self.results[0] for result in self.results)

    def __str__(self) -> str:
        said = []
        for rank, (seen, result, calls) in enumerate(zip(self.seen, self.results, self.calls)):
            end = "waits in it for rank 0" if calls > self.calls[0] else f"returned {result}"
            said.append(f"rank {rank} saw {seen}, called broadcast {_times(calls)} and {end}")
        return "; ".join(said)


@exercise("4.4", title="rebuild the order", minutes=8, needs="rebuilt_order", hints=HINTS, mistakes=MISTAKES)
def rebuild_the_order(answer: Callable, draw: random.Random) -> Verdict:
    """Rows over the example and some forty first windows drawn by chance."""
    example = _played(answer, {0: 2, 1: 1, 2: 1, 3: 1}, [[0, 3, 2, 1, 0], [3, 0, 2, 0, 1]])
    cases = [_played(answer, *_window(draw, number % 2 == 0, number % 4)) for number in range(40)]
    if fault := next(filter(None, map(_shape_fault, (example, *cases))), None):
        return Verdict((fault,))
    whole, tied = [c for c in cases if c.all_complete], [c for c in cases if c.all_complete and c.tied]
    rank_0, others = [c for c in cases if not c.complete(0)], [c for c in cases if c.complete(0) and not c.all_complete]
    rows = (
        Row("the example of the text", example.results == [[3, 2, 1, 0]] * 2, "[3, 2, 1, 0] on both ranks",
            str(example)),
        _row("every rank calls broadcast", "the same number of calls on all ranks", cases,
             lambda c: len(set(c.calls)) < 2),
        _row("all ranks have the same order", "equal results", whole, lambda c: c.agree),
        _row("each parameter has one place", "all ids, each once", whole,
             lambda c: all(sorted(r or []) == sorted(c.uses) for r in c.results)),
        _row("it is the order of rank 0", "first complete, first in the list", whole,
             lambda c: c.results[0] == c.expected),
        _row("a parameter used twice stands at its last use", "complete when all its uses are", tied,
             lambda c: c.results[0] == c.expected),
        _row("an incomplete window on rank 0 changes nothing", "None on every rank", rank_0,
             lambda c: all(result is None for result in c.results)),
        _row("an incomplete window elsewhere leaves it to rank 0", "the order of rank 0 on every rank", others,
             lambda c: all(result == c.expected for result in c.results)),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(whole, tied, rank_0, others))


def _mistake(whole: list[Case], tied: list[Case], rank_0: list[Case], others: list[Case]) -> str:
    """The mistake that explains what all cases show; complete windows first, the plainest one first."""
    if any(len(set(c.calls)) > 1 for c in (*whole, *rank_0, *others)):
        return "hangs"
    if all(result is None for c in whole for result in c.results):
        return "no_result"
    if any(len(result or []) > len(set(result or [])) for c in whole for result in c.results):
        return "repeats"
    if all(c.results[0] in (sorted(c.uses), sorted(c.uses)[::-1]) for c in whole):
        return "sorts_by_id"
    if all(c.results == [c.order(rank) for rank in range(len(c.seen))] for c in whole):
        return "own_order"
    if all(c.results[0] == list(dict.fromkeys(c.seen[0])) for c in whole):
        return "first_ready"
    if all(c.results[0] == c.order(0)[::-1] for c in whole):
        return "turned_around"
    if not all(c.results[0] == c.expected and c.agree for c in whole):
        return ""
    if any(c.results[0] is not None for c in rank_0):
        return "too_early"
    if not all(c.agree for c in (*rank_0, *others)):
        return "decides_alone"
    return ""


def _row(name: str, expected: str, cases: list[Case], holds: Callable[[Case], bool]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: (len(c.seen), len(c.uses)))
    seen = str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} windows"
    return Row(name, not broken, expected, seen)


def _shape_fault(case: Case) -> Row | None:
    """What is wrong with the form of an answer. A list of lists, say, or a number."""
    for rank, result in enumerate(case.results):
        if result is not None and not (isinstance(result, list) and all(isinstance(i, int) for i in result)):
            seen = f"rank {rank} returned {result!r}"
            return Row("returns a list of ids, or None", False, "for instance [3, 2, 1, 0]", seen)
    return None


def _window(draw: random.Random, tied: bool, gap: int) -> tuple[dict[int, int], list[list[int]]]:
    """Uses, and what each rank saw. `gap` 2: rank 0 misses a call; 3: another rank does; else nobody."""
    count, ranks = draw.randint(4, 6), draw.randint(2, 4)
    uses = dict.fromkeys(draw.sample(range(20), count), 1)
    if tied:
        uses[draw.choice(list(uses))] = 2
    while True:
        seen = [draw.sample(list(Counter(uses).elements()), count + tied) for _ in range(ranks)]
        case = Case(uses, seen, [], [])
        orders = [case.order(rank) for rank in range(ranks)]
        by_id, first = sorted(uses), list(dict.fromkeys(seen[0]))
        if all(o != orders[0] for o in orders[1:]) and orders[0] not in (by_id, by_id[::-1]) and (
                first != orders[0]) == tied:  # fmt: skip
            break
    if gap >= 2:
        missing = seen[0 if gap == 2 else draw.randint(1, ranks - 1)]
        twice = [index for index in missing if uses[index] == 2]
        missing.remove(draw.choice(twice or missing))
    return uses, seen


def _played(answer: Callable, uses: dict[int, int], seen: list[list[int]]) -> Case:
    """The answer called on every rank, rank 0 first: what it broadcasts is there for the others."""
    sent: list[Any] = []
    case = Case(uses, seen, [], [])
    for rank, mine in enumerate(seen):
        case.calls.append(0)

        def broadcast(value: Any, rank: int = rank) -> Any:
            if rank == 0:
                sent.append(copy.deepcopy(value))
            case.calls[rank] += 1
            if case.calls[rank] > len(sent):
                raise Hang
            return copy.deepcopy(sent[case.calls[rank] - 1])

        shown = f"rebuilt_order({mine}, {uses}, broadcast) on rank {rank}"
        try:
            case.results.append(_plain(call(answer, list(mine), dict(uses), broadcast, shown=shown)))
        except Hang:
            case.results.append([])
    return case


def _plain(result: Any) -> Any:
    """Tuples as lists, and whole numbers of any kind as `int`."""
    try:
        return [int(index) if int(index) == index else index for index in result]
    except (TypeError, ValueError, OverflowError):
        return result


def _times(calls: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(calls, f"{calls} times")
