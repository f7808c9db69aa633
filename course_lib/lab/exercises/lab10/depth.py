"""Exercise 10.4: how many micro-batches a pipeline of this depth needs.

The learner writes `micro_batches(p, percent, v)`: the smallest m ≥ 1, a multiple of p where v > 1, for which the bubble
is no more than `percent` % of the *step*: (p−1)/(v·m+p−1) ≤ percent/100, with a whole percent from 1 to 100.
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
    "Write the bubble as an inequality, (p−1)/(v·m+p−1) ≤ percent/100, and solve it for m. Then: m is a whole number, "
    "at least 1, and with v > 1 a multiple of p.",
    "v·m ≥ (p−1)·(100−percent)/percent. Round *up*: a little fewer micro-batches is a little more bubble. With v > 1 "
    "go on up to the next multiple of p.",
    "needed = (p - 1) * (100 - percent) / percent / v; unit = p if v > 1 else 1; return max(unit, unit * "
    "math.ceil(needed / unit)).",
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end?",
    "of_the_ideal": "You hold (p−1)/(v·m) against the limit: that is the bubble as a share of the *ideal time*, "
    "without the bubble itself. Here the share of the step is asked for, (p−1)/(v·m+p−1). Papers use both, and do not "
    "always say which.",
    "rounds_down": "You round down, and the bubble is then a little over the limit.",
    "one_more": "Where the bubble is met exactly, one more is not needed. `//` and + 1 is not rounding up; nor is a "
    "ceil of 12.000000000000002, which is what 3·(1 − 0.2)/0.2 gives: 100 − percent and percent are whole numbers.",
    "ignores_v": "With v stages a rank the bubble is v times smaller, so that fewer micro-batches do.",
    "not_a_multiple": "The formula for v > 1 holds where p divides m: micro-batches travel in rounds of p.",
    "none_at_all": "A pipeline of one stage has no bubble, and a limit of 100 % allows any; still a step has at least "
    "one micro-batch (with v > 1, a round of p).",
}


class Case(NamedTuple):
    """One pipeline and what came back for it."""

    p: int
    percent: int
    v: int
    got: Any = None

    def right(self) -> int:
        return _count(self, lambda m: 100 * (self.p - 1) <= self.percent * (self.v * m + self.p - 1))

    def ok(self) -> bool:
        return self.got == self.right()

    def __str__(self) -> str:
        m = self.right()
        return (f"micro_batches({self.p}, {self.percent}, {self.v}) gave {self.got}; with m = {m} the bubble is "
                f"{100 * (self.p - 1) / (self.v * m + self.p - 1):.3g} %")


def _count(case: Case, holds: Callable[[int], bool]) -> int:
    return next(m for m in range(_unit(case), 10**6, _unit(case)) if holds(m))


@exercise("10.4", title="micro-batches against depth", minutes=5, needs="micro_batches", hints=HINTS,
          mistakes=MISTAKES)
def count_the_micro_batches(answer: Callable, draw: random.Random) -> Verdict:
    """Rows over limits that are met exactly and others, for one stage a rank and for several."""
    cases = []
    for case in [Case(4, 20, 1), *_drawn(draw)]:
        shown = f"micro_batches({case.p}, {case.percent}, {case.v})"
        got = call(answer, case.p, case.percent, case.v, shown=shown)
        if not isinstance(got, Number) or isinstance(got, bool | complex):
            return Verdict((Row("returns a whole number", False, "a number of micro-batches", f"{shown} gave {got}"),),
                           "no_result" if got is None else "")  # fmt: skip
        cases.append(case._replace(got=got))
    one, several = [c for c in cases if c.v == 1], [c for c in cases if c.v > 1]
    rows = (
        _row("the example of the text", "12", cases[:1]),
        _row("one stage a rank", "the smallest m", one),
        _row("several stages a rank", "the smallest multiple of p", several),
    )
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(cases))


def _drawn(draw: random.Random) -> list[Case]:
    """Limits on the formula and off it, a single stage, and no limit."""
    out = [Case(draw.choice([2, 4, 8, 16]), percent, 1) for percent in (5, 10, 20, 25, 50)]
    out += [Case(draw.choice([4, 8, 16]), draw.choice([3, 7, 11, 15, 30, 40]), v) for v in (1, 1, 2, 2, 3, 3, 4)]
    met = [Case(2, 20, 2), Case(4, 20, 3)]
    return [*out, *met, Case(1, 10, 1), Case(4, 100, 1), Case(4, 90, 2), Case(8, 15, 2)]


def _mistake(cases: list[Case]) -> str:
    """The mistake whose answers are those that were given."""
    usual = [c for c in cases if c.right() > _unit(c)]
    for key, wrong in _WRONG.items():
        if all(c.got == wrong(c) for c in usual):
            return "none_at_all" if key == "right" else key
    off = [c for c in usual if not c.ok()]
    return "one_more" if off and all(c.got == c.right() + _unit(c) and _needed(c) == c.right() for c in off) else ""


def _unit(c: Case) -> int:
    return c.p if c.v > 1 else 1


def _needed(c: Case) -> Fraction:
    return Fraction((c.p - 1) * (100 - c.percent), c.percent * c.v)


def _up(c: Case, needed: Fraction) -> int:
    return _unit(c) * -(-needed // _unit(c))


_WRONG: dict[str, Callable[[Case], int]] = {
    "right": Case.right,
    "of_the_ideal": lambda c: _up(c, Fraction((c.p - 1) * 100, c.percent * c.v)),
    "rounds_down": lambda c: _unit(c) * (_needed(c) // _unit(c)),
    "one_more": lambda c: _unit(c) * (_needed(c) // _unit(c) + 1),
    "ignores_v": lambda c: _up(c, _needed(c) * c.v),
    "not_a_multiple": lambda c: -(-_needed(c) // 1),
}


def _row(name: str, expected: str, cases: list[Case]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not c.ok()), key=lambda c: (c.p, c.v))
    return Row(name, not broken, expected, str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} cases")
