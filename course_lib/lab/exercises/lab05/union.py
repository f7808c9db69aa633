"""Exercise 5.1: the union of intervals.

The learner writes `union(spans)`:

- `spans` lists (start, stop) in whole nanoseconds, in no particular order. A span covers its start and not its stop.
- The result lists the (start, stop) that cover the same moments, sorted and apart from each other: spans that overlap
  or touch are one, and a span without length is none.

The check works from the moments that are covered, one by one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

from course_lib.lab.guard import call
from course_lib.lab.model import Row, Verdict, exercise

Spans = list[tuple[int, int]]

HINTS = (
    "Sort by start first. Then each span can only concern the last one of your result: it overlaps or touches that "
    "one, or it begins a new one.",
    "When a span begins at or before the end of the last one, the two are one, and it ends where the *later* of the "
    "two ends. A long span may contain a short one that comes after it.",
    "out = []; for start, stop in sorted(spans): if start == stop: continue; if out and start <= out[-1][1]: "
    "out[-1] = (out[-1][0], max(out[-1][1], stop)); else: out.append((start, stop)).",
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end?",
    "never_joined": "Your result is the spans themselves, sorted. Two that overlap cover the moments between them "
    "once: join them, or each is counted in full.",
    "loses_the_container": "A long span contains a short one, and your result ends with the short one. The stop of "
    "what you join is the later of both stops, not the stop of the one that came last.",
    "order_of_arrival": "You join each span with the one before it in the list. Spans come in no particular order, and "
    "from several threads: sort them first.",
    "touching_apart": "Spans that touch stay apart in your result. One stops at 4 and does not cover 4, the next "
    "starts there: nothing lies between them, so they are one.",
    "closed_ends": "You join spans with a gap of one between them, as if a span covered its stop. From 0 to 4 covers "
    "0, 1, 2 and 3; the next may start at 5, and then 4 is idle.",
    "keeps_the_empty": "A span that starts and stops at the same moment covers nothing. Leave it out.",
}


class Case(NamedTuple):
    spans: Spans
    got: Spans

    def __str__(self) -> str:
        return f"union({self.spans}) gave {self.got}"

    def right(self) -> Spans:
        """From the moments that are covered, one by one."""
        covered = sorted(moments(self.spans))
        starts = [t for t in covered if t - 1 not in set(covered)]
        stops = [t + 1 for t in covered if t + 1 not in set(covered)]
        return list(zip(starts, stops))


@exercise("5.1", title="the union of intervals", minutes=6, needs="union", hints=HINTS, mistakes=MISTAKES)
def union_of_intervals(answer: Callable[[Spans], Spans], draw: random.Random) -> Verdict:
    """Rows for the example, for spans that overlap, contain, touch or leave a gap of one, and for empty ones."""
    example = [(6, 9), (0, 4), (4, 5), (2, 3), (7, 7)]
    kinds = {
        "example": [example],
        "contained": [_shuffled(draw, [(0, 20), (3, draw.randint(5, 12)), (30, 33)]) for _ in range(6)],
        "apart": [_shuffled(draw, [(0, 4), (5, 9), (9 + draw.randint(1, 2), 15)]) for _ in range(6)],
        "touching": [_shuffled(draw, [(0, 4), (4, 9), (draw.randint(11, 13), 15)]) for _ in range(6)],
        "empty": [[], [(3, 3)], [(0, 5), (9, 9), (12, 14)], [(2, 2), (2, 6), (6, 6)]],
        "drawn": [_drawn(draw) for _ in range(30)],
    }
    cases: dict[str, list[Case]] = {kind: [] for kind in kinds}
    for kind, lists in kinds.items():
        for spans in lists:
            shown = f"union({spans})"
            got = call(answer, list(spans), shown=shown)
            if got is None:
                row = Row("returns the union", False, "a list of (start, stop)", f"{shown} gave None")
                return Verdict((row,), "no_result")
            try:
                cases[kind].append(Case(spans, [(int(start), int(stop)) for start, stop in got]))
            except (TypeError, ValueError):
                row = Row("returns a list of (start, stop)", False, "for instance [(0, 5), (6, 9)]",
                          f"{shown} gave {got!r}")
                return Verdict((row,))
    rows = (
        _row("the example of the text", "[(0, 5), (6, 9)]", cases["example"]),
        _row("one span contains another", "the longer one stays whole", cases["contained"]),
        _row("spans that touch", "are one", cases["touching"]),
        _row("spans with a gap of one", "stay apart", cases["apart"]),
        _row("spans without length", "are left out", cases["empty"]),
        _row("many spans in any order", "each moment is covered once", cases["drawn"]),
    )
    every = [case for some in cases.values() for case in some]
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(every))


def moments(spans: Iterable[tuple[int, int]]) -> set[int]:
    return {t for start, stop in spans for t in range(start, stop)}


def _mistake(cases: list[Case]) -> str:
    """The mistake that explains what all cases show; the plainest one first."""
    if any(all(sorted(case.got) == sorted(some(case.spans)) for case in cases) for some in (list, _full)):
        return "never_joined"
    wrong: dict[str, Callable[[Spans], Spans]] = {
        "order_of_arrival": lambda spans: _joined(_full(spans), gap=0),
        "loses_the_container": lambda spans: _joined(sorted(_full(spans)), gap=0, contain=False),
        "touching_apart": lambda spans: _joined(sorted(_full(spans)), gap=-1),
        "closed_ends": lambda spans: _joined(sorted(_full(spans)), gap=1),
        "keeps_the_empty": lambda spans: _joined(sorted(spans), gap=0),
    }
    for mistake, value in wrong.items():
        if all(case.got == value(case.spans) for case in cases):
            return mistake
    for mistake, value in wrong.items():  # the same with empty spans treated in another way
        if all(_full(case.got) == _full(value(_full(case.spans))) for case in cases):
            return mistake
    return ""


def _joined(spans: Iterable[tuple[int, int]], gap: int, contain: bool = True) -> Spans:
    """What one gets by joining each with the last: those at most `gap` apart. `contain=False` forgets the longer."""
    out: Spans = []
    for start, stop in spans:
        if out and start <= out[-1][1] + gap:
            out[-1] = (out[-1][0], max(out[-1][1], stop) if contain else stop)
        else:
            out.append((start, stop))
    return out


def _full(spans: Iterable[tuple[int, int]]) -> Spans:
    return [span for span in spans if span[0] < span[1]]


def _row(name: str, expected: str, cases: list[Case]) -> Row:
    broken = sorted((c for c in cases if c.got != c.right()), key=lambda c: len(c.spans))
    seen = f"{broken[0]}; right is {broken[0].right()}" if broken else f"held in {len(cases)} of {len(cases)} lists"
    return Row(name, not broken, expected, seen)


def _drawn(draw: random.Random) -> Spans:
    """Several spans, some of which overlap, out of order."""
    spans = [(start, start + draw.randint(0, 7)) for start in (draw.randint(0, 50) for _ in range(draw.randint(5, 10)))]
    while all(a <= b for a, b in pairwise(spans)):
        draw.shuffle(spans)
        spans.append((spans[0][0] + 60, spans[0][0] + 62))
        spans.insert(0, (spans[0][0] + 65, spans[0][0] + 66))
    return spans


def _shuffled(draw: random.Random, spans: Spans) -> Spans:
    draw.shuffle(spans)
    return spans
