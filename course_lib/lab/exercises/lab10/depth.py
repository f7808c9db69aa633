"""Exercise 10.4: how many micro-batches a pipeline of this depth needs.

The learner writes `micro_batches(p, bubble, v)`: the smallest m, a multiple of p where v > 1, for which the bubble is
no more than `bubble` of the *step*: (p−1)/(v·m+p−1) ≤ bubble, with 0 < bubble ≤ 1. Bubbles are given as fractions, so
that nothing is left to rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from numbers import Number
from typing import Any, NamedTuple

from course_lib.lab.guard import call
from course_lib.lab.model import Row, Verdict, exercise

HINTS = (
    "Write the bubble as an inequality, (p−1)/(v·m+p−1) ≤ bubble, and solve it for m. Then: m is a whole number, at "
    "least 1, and with v > 1 a multiple of p.",
    "v·m ≥ (p−1)·(1−bubble)/bubble. Round *up*: a little fewer micro-batches is a little more bubble. With v > 1 go "
    "on up to the next multiple of p.",
    "needed = (p - 1) * (1 - bubble) / bubble / v; unit = p if v > 1 else 1; return max(unit, unit * math.ceil(needed "
    "/ unit)).",
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end?",
    "of_the_ideal": "You hold (p−1)/(v·m) against the limit: that is the bubble as a share of the *ideal time*, "
    "without the bubble itself. Here the share of the step is asked for, (p−1)/(v·m+p−1). Papers use both, and do not "
    "always say which.",
    "rounds_down": "You round down, and the bubble is then a little over the limit.",
    "one_more": "Where the bubble is met exactly, one more is not needed: `//` and + 1 is not rounding up.",
    "ignores_v": "With v stages a rank the bubble is v times smaller, so that fewer micro-batches do.",
    "not_a_multiple": "The formula for v > 1 holds where p divides m: micro-batches travel in rounds of p.",
    "none_at_all": "A pipeline of one stage has no bubble, and a limit of 1 allows any; still a step has at least one "
    "micro-batch (with v > 1, a round of p).",
}


class Case(NamedTuple):
    """One pipeline and what came back for it."""

    p: int
    bubble: Fraction
    v: int
    got: Any = None

    def right(self) -> int:
        return _count(self, lambda m: Fraction(self.p - 1, self.v * m + self.p - 1) <= self.bubble)

    def ok(self) -> bool:
        return self.got == self.right()

    def __str__(self) -> str:
        return (f"micro_batches({self.p}, {self.bubble}, {self.v}) gave {self.got}; with m = {self.right()} the bubble "
                f"is {Fraction(self.p - 1, self.v * self.right() + self.p - 1)}")


def _count(case: Case, holds: Callable[[int], bool]) -> int:
    unit = case.p if case.v > 1 else 1
    return next(m for m in range(unit, 10**6, unit) if holds(m))


@exercise("10.4", title="micro-batches against depth", minutes=5, needs="micro_batches", hints=HINTS,
          mistakes=MISTAKES)
def count_the_micro_batches(answer: Callable, draw: random.Random) -> Verdict:
    """Rows over limits that are met exactly and others, for one stage a rank and for several."""
    cases = []
    for case in [Case(4, Fraction(3, 11), 1), *_drawn(draw)]:
        shown = f"micro_batches({case.p}, {case.bubble}, {case.v})"
        got = call(answer, case.p, case.bubble, case.v, shown=shown)
        if not isinstance(got, Number) or isinstance(got, bool | complex):
            return Verdict((Row("returns a whole number", False, "a number of micro-batches", f"{shown} gave {got}"),),
                           "no_result" if got is None else "")  # fmt: skip
        cases.append(case._replace(got=got))
    one, several = [c for c in cases if c.v == 1], [c for c in cases if c.v > 1]
    rows = (
        _row("the example of the text", "8", cases[:1]),
        _row("one stage a rank", "the smallest m", one),
        _row("several stages a rank", "the smallest multiple of p", several),
    )
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(cases))


def _drawn(draw: random.Random) -> list[Case]:
    """Limits on the formula and off it, a single stage, and no limit."""
    out = []
    for v in (1, 1, 1, 2, 3, 4):
        p = draw.choice([2, 4, 8, 16])
        m = p * draw.randint(2, 6)
        out += [Case(p, Fraction(p - 1, v * m + p - 1), v), Case(p, Fraction(draw.randint(3, 30), 97), v)]
    return [*out, Case(1, Fraction(1, 10), 1), Case(4, Fraction(1), 1), Case(4, Fraction(9, 10), 2),
            Case(4, Fraction(1, 5), 2)]


def _mistake(cases: list[Case]) -> str:
    """The mistake whose answers are those that were given."""
    usual = [c for c in cases if c.right() > (c.p if c.v > 1 else 1)]
    for key, wrong in _WRONG.items():
        if all(c.got == wrong(c) for c in usual):
            return "none_at_all" if key == "right" else key
    return ""


def _needed(c: Case) -> Fraction:
    return (c.p - 1) * (1 - c.bubble) / c.bubble / c.v


def _up(c: Case, needed: Fraction) -> int:
    unit = c.p if c.v > 1 else 1
    return unit * -(-needed // unit)


_WRONG: dict[str, Callable[[Case], int]] = {
    "right": Case.right,
    "of_the_ideal": lambda c: _up(c, (c.p - 1) / c.bubble / c.v),
    "rounds_down": lambda c: (c.p if c.v > 1 else 1) * (_needed(c) // (c.p if c.v > 1 else 1)),
    "one_more": lambda c: (c.p if c.v > 1 else 1) * (_needed(c) // (c.p if c.v > 1 else 1) + 1),
    "ignores_v": lambda c: _up(c, _needed(c) * c.v),
    "not_a_multiple": lambda c: -(-_needed(c) // 1),
}


def _row(name: str, expected: str, cases: list[Case]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not c.ok()), key=lambda c: (c.p, c.v))
    return Row(name, not broken, expected, str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} cases")
