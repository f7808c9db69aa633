"""Exercise 1.1: N = B/(b·D), and a refusal for every combination that cannot be.

The learner writes `accumulation_steps(B, b, D)`: the whole number of micro-steps, or a `ValueError` that says
what is wrong. The check states the rule by multiplying back.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from operator import index
from typing import Any, NamedTuple

from course_lib.lab.guard import Broke, call
from course_lib.lab.model import Row, Verdict, exercise

HINTS = (
    "One micro-step of all ranks together takes b·D samples. N is how often that goes into B, and it must go without a "
    "remainder. First compute b·D, and look at what can be wrong with it.",
    "B % (b * D) is the remainder. Where it is not 0, raise ValueError with a sentence. A batch or a degree below 1 is "
    "refused before that, or the remainder itself fails.",
    'if min(B, b, D) < 1: raise ValueError("…"); then if B % (b * D): raise ValueError(f"{B} is not a multiple of '
    '{b * D}"); at the end return B // (b * D).',
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end?",
    "floor": "You round down. Then N·b·D is less than B: some samples of every batch are never seen, the learning rate "
    "is for a batch that you do not have, and nobody is told. Refuse instead.",
    "ceil": "You round up. Then N·b·D is more than B: the last micro-step needs samples that the batch does not have. "
    "Refuse instead.",
    "fraction": "You return a number with a fraction. Nobody can run 31.25 micro-steps. Return a whole number (an int) "
    "and refuse where there is none.",
    "forgets_D": "You leave D out. All D ranks work on the same micro-step, each on b samples, so one micro-step takes "
    "b·D samples of the batch.",
    "other_exception": "You refuse, but not with ValueError. A caller who catches ValueError will miss it; an `assert` "
    "even disappears when Python runs with -O.",
    "answers_anyway": "Where there is no N you return something in its place: a number, None, or the exception itself. "
    "Whoever calls your function goes on with that, and fails much later and elsewhere. `raise ValueError(…)` there.",
    "below_one": "You accept batches or degrees below 1. Two minus signs cancel: B = 64, b = -4, D = -8 looks like "
    "N = 2. And a 0 fails on its own, with a ZeroDivisionError that explains nothing. Refuse all of them first.",
    "wordless": "You refuse without a word. Whoever gets the ValueError wants to know what to change: put the numbers "
    "into its message.",
}


class Case(NamedTuple):
    """`got` is what came back, or the exception."""

    B: int
    b: int
    D: int
    got: Any

    @property
    def each(self) -> int:
        return self.b * self.D

    @property
    def refused(self) -> bool:
        return isinstance(self.got, ValueError)

    @property
    def right(self) -> bool:
        return isinstance(self.got, int | float) and self.got * self.each == self.B

    def __str__(self) -> str:
        got = f"raised {type(self.got).__name__}" if isinstance(self.got, Exception) else f"gave {self.got}"
        return f"accumulation_steps({self.B}, {self.b}, {self.D}) {got}"


@exercise("1.1", title="how many micro-steps", minutes=5, needs="accumulation_steps", hints=HINTS,
          mistakes=MISTAKES)  # fmt: skip
def accumulation_steps(answer: Callable[[int, int, int], int], draw: random.Random) -> Verdict:
    """Rows for the example, for batches that divide, for others, for those too small, and for degrees below 1."""
    possible = [_possible(draw) for _ in range(20)]
    ragged = [(B + draw.randint(1, b * D - 1), b, D) for B, b, D in possible[:10]]
    small = [(draw.randint(1, b * D - 1), b, D) for B, b, D in possible[10:]]
    B, b, D = possible[0]
    below = [(B, 0, D), (B, b, 0), (0, b, D), (-B, b, D), (B, -b, -D), (-B, -b, D)]
    cases: list[list[Case]] = []
    for group in ([(1024, 4, 8)], possible, ragged, small, below):
        cases.append([])
        for arguments in group:
            try:
                got = call(answer, *arguments, shown=f"accumulation_steps{arguments}")
            except Broke as broke:
                got = broke.__cause__
                if not isinstance(got, ValueError | ArithmeticError | AssertionError | RuntimeError) and (
                        type(got) is not Exception):  # fmt: skip
                    raise
            else:
                if group in (ragged, small, below) and not (isinstance(got, int | float) or hasattr(got, "__index__")):
                    row = Row("what cannot be is refused", False, "raise ValueError(…)",
                              f"accumulation_steps{arguments} returned {got!r}")
                    return Verdict((row,), "answers_anyway")
            if got is None:
                row = Row("returns N", False, "a whole number", f"accumulation_steps{arguments} gave None")
                return Verdict((row,), "no_result")
            got = index(got) if hasattr(got, "__index__") else got
            if not isinstance(got, int | float | Exception):
                row = Row("returns a number", False, "for instance 32", f"accumulation_steps{arguments} gave {got!r}")
                return Verdict((row,))
            cases[-1].append(Case(*arguments, got))
    example, whole, ragged_, small_, below_ = cases
    refusals = [c for c in (*ragged_, *small_, *below_) if c.refused]
    rows = (
        _row("the example of the text", "32", example, lambda c: c.right),
        _row("N·b·D gives B back", "a whole number", whole, lambda c: c.right and isinstance(c.got, int)),
        _row("a B that is no multiple of b·D is refused", "ValueError", ragged_, lambda c: c.refused),
        _row("a B smaller than b·D is refused", "ValueError", small_, lambda c: c.refused),
        _row("anything below 1 is refused", "ValueError", below_, lambda c: c.refused),
        _row("a refusal says why", "a message of some words", refusals, lambda c: len(str(c.got)) >= 8),
    )
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(whole, ragged_ + small_, below_))


def _mistake(whole: list[Case], rest: list[Case], below: list[Case]) -> str:
    """The mistake that explains what all cases show; the plainest one first."""
    if any(isinstance(c.got, Exception) and not c.refused for c in rest):
        return "other_exception"
    if all(c.got == c.B // c.b for c in whole):
        return "forgets_D"
    if all(isinstance(c.got, float) for c in whole):
        return "fraction"
    if not all(c.right for c in whole):
        return ""
    accepted = [c for c in rest if not c.refused]
    if accepted and all(c.got in (c.B // c.each, max(1, c.B // c.each)) for c in accepted):
        return "floor"
    if accepted and all(c.got == -(-c.B // c.each) for c in accepted):
        return "ceil"
    if len({c.got for c in accepted}) == 1 and len(accepted) == len(rest):
        return "answers_anyway"
    if all(c.refused for c in rest) and any(not c.refused for c in below):
        return "below_one"
    if all(c.refused for c in (*rest, *below)):
        return "wordless"
    return ""


def _row(name: str, expected: str, cases: list[Case], holds: Callable[[Case], bool]) -> Row:
    broken = [c for c in cases if not holds(c)]
    seen = str(broken[0]) if broken else f"held for {len(cases)} of {len(cases)}"
    return Row(name, not broken, expected, seen)


def _possible(draw: random.Random) -> tuple[int, int, int]:
    """B, b and D with N = B/(b·D) at least 2, and D at least 2."""
    b, D = draw.randint(2, 8), draw.choice([2, 3, 4, 8, 16])
    return b * D * draw.randint(2, 12), b, D
