"""Exercise 0.2: the exposed time of a small timeline.

The learner writes `exposed_ms(compute, comm)`:

- both are lists of (start, stop) in whole milliseconds, in no particular order; a span covers its start and not
  its stop. Spans of a list may overlap each other.
- the result is how many milliseconds there are in which something is sent and nothing is computed.

The check states the rule; it does not hold a solution.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import NamedTuple

from course_lib.lab.guard import call
from course_lib.lab.model import Row, Verdict, exercise

Spans = list[tuple[int, int]]

HINTS = (
    "Ask it of a single millisecond first: is something sent in it? Is something computed in it? It is exposed if the "
    "answers are yes and no. Then count such milliseconds.",
    "range(start, stop) lists the milliseconds of one span, without the stop. A set of them holds each millisecond "
    "once, however many spans cover it.",
    "computing = {t for start, stop in compute for t in range(start, stop)}, and sending likewise from comm. The "
    "difference of two sets, sending - computing, is what is exposed; len() counts it.",
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end?",
    "totals": "You subtract the total of compute from the total of communication. Two totals cannot tell *when* things "
    "happened: 10 ms of compute hide nothing if they come before the sending. Compare them moment by moment.",
    "counts_twice": "Where two transfers overlap, you count the same millisecond twice. Waiting happens once. Join the "
    "spans of communication first, then count.",
    "hidden": "You return the milliseconds in which both happen. That communication is hidden. Exposed is the "
    "rest of it.",
    "all_communication": "You return all the time of communication. The part of it with compute beside it costs "
    "nothing: leave that out.",
    "no_compute": "You count milliseconds without compute, and also those in which nothing is sent. Exposed needs "
    "both: something is sent, and nothing is computed.",
    "closed_ends": "Your spans include their stop. A span from 0 to 4 covers four milliseconds, 0 to 3; the next may "
    "begin at 4. range(start, stop) does it right.",
    "compute_alone": "You return the milliseconds of compute in which nothing is sent. It is the other way round: "
    "sent, and not computed.",
}


class Case(NamedTuple):
    compute: Spans
    comm: Spans
    got: float

    @property
    def c(self) -> set[int]:
        return _moments(self.compute)

    @property
    def m(self) -> set[int]:
        return _moments(self.comm)

    def __str__(self) -> str:
        return f"compute {self.compute}, comm {self.comm} gave {self.got:g}"


@exercise("0.2", title="exposed time of a small timeline", minutes=4, needs="exposed_ms", hints=HINTS,
          mistakes=MISTAKES)  # fmt: skip
def exposed_time(answer: Callable[[Spans, Spans], float], draw: random.Random) -> Verdict:
    """Rows for the example, for single wires, for transfers that overlap each other, and for the empty cases."""
    single, several = [_drawn(draw, 1) for _ in range(15)], [_drawn(draw, 2) for _ in range(15)]
    edges = [([], [(0, 5)]), ([(2, 9)], []), ([(0, 4)], [(4, 9)]), ([(0, 9)], [(2, 4)])]
    cases = []
    for compute, comm in [([(0, 10)], [(4, 13)]), *single, *several, *edges]:
        shown = f"exposed_ms({compute}, {comm})"
        got = call(answer, list(compute), list(comm), shown=shown)
        if got is None:
            row = Row("returns the exposed time", False, "a number of milliseconds", f"{shown} gave None")
            return Verdict((row,), "no_result")
        try:
            cases.append(Case(compute, comm, float(got)))
        except (TypeError, ValueError):
            return Verdict((Row("returns a number", False, "for instance 3", f"{shown} gave {got!r}"),))
    example, single, several, edges = cases[:1], cases[1:16], cases[16:31], cases[31:]
    rows = (
        _row("the example of the text", "3", example),
        _row("one transfer at a time", "sent, and not computed", single),
        _row("transfers that overlap each other", "each millisecond counts once", several),
        _row("no compute, no communication, and neighbours", "5, 0, 5 and 0 ms", edges),
    )
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(cases, several))


def _row(name: str, expected: str, cases: list[Case]) -> Row:
    broken = sorted((c for c in cases if c.got != len(c.m - c.c)), key=lambda c: len(c.compute) + len(c.comm))
    seen = f"{broken[0]}; right is {len(broken[0].m - broken[0].c)}" if broken else f"held in {len(cases)} timelines"
    return Row(name, not broken, expected, seen)


def _mistake(cases: list[Case], several: list[Case]) -> str:
    wrong: dict[str, Callable[[Case], float]] = {
        "all_communication": lambda c: len(c.m),
        "hidden": lambda c: len(c.m & c.c),
        "compute_alone": lambda c: len(c.c - c.m),
        "no_compute": lambda c: len(set(range(max((stop for _, stop in c.compute + c.comm), default=0))) - c.c),
        "closed_ends": lambda c: len(_moments(c.comm, 1) - _moments(c.compute, 1)),
        "counts_twice": lambda c: sum(len(_moments([span]) - c.c) for span in c.comm),
    }
    for mistake, value in wrong.items():
        if all(c.got == value(c) for c in cases):
            return mistake
    if all(c.got == len(c.m - _moments(c.compute, 1)) for c in cases):
        return "closed_ends"
    if any(all(c.got == total(c) for c in cases) for total in _totals()):
        return "totals"
    return ""


def _totals() -> list[Callable[[Case], float]]:
    """Total against total: spans summed or joined, with and without a floor at 0."""
    def summed(spans: Spans) -> int:
        return sum(stop - start for start, stop in spans)

    return [lambda c: summed(c.comm) - summed(c.compute), lambda c: max(0, summed(c.comm) - summed(c.compute)),
            lambda c: len(c.m) - len(c.c), lambda c: max(0, len(c.m) - len(c.c)),
            lambda c: abs(summed(c.comm) - summed(c.compute))]  # fmt: skip


def _moments(spans: Iterable[tuple[int, int]], more: int = 0) -> set[int]:
    return {t for start, stop in spans for t in range(start, stop + more)}


def _drawn(draw: random.Random, wires: int) -> tuple[Spans, Spans]:
    """Compute with gaps, and communication that begins under it. With two wires, transfers overlap; shuffled."""
    compute = _lane(draw, draw.randint(0, 3), 3)
    comm = [span for wire in range(wires) for span in _lane(draw, draw.randint(2, 5) + wire, 3)]
    if wires > 1:  # the first transfer is surely doubled where nothing is computed
        late = max(stop for _, stop in compute + comm)
        comm += [(late, late + 4), (late + 1, late + 5)]
    draw.shuffle(compute)
    draw.shuffle(comm)
    return compute, comm


def _lane(draw: random.Random, begin: int, count: int) -> Spans:
    spans, at = [], begin
    for _ in range(count):
        stop = at + draw.randint(2, 6)
        spans.append((at, stop))
        at = stop + draw.randint(1, 3)
    return spans
