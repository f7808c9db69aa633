"""Exercise 0.1: a function that runs on every rank and returns this rank's part of a mean.

The learner writes `part_of_mean(rank, ranks, numbers)`:

- every rank is given all `numbers`, and takes those at the places `rank`, `rank + ranks`, `rank + 2·ranks`, …
- it returns the sum of those, divided by how many numbers there are in all; 0 if it has none.
- the results of all ranks then add up to the mean.

The check states these rules; it does not hold a solution.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

from course_lib.lab.guard import Broke, call
from course_lib.lab.model import Row, Verdict, exercise

HINTS = (
    "The same function runs on every rank, and only the argument `rank` differs. So ask of each number whether it "
    "belongs to this rank: the places rank, rank + ranks, rank + 2·ranks, …",
    "Python's slice numbers[start::step] picks every step-th number from a start. Add up what you picked. The mean of "
    "all numbers has their total count below the line, so each rank divides its own sum by that count.",
    "mine = numbers[rank::ranks], then return sum(mine) / len(numbers). There is no special case for a rank without "
    "numbers: the sum of an empty list is 0.",
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end?",
    "everything": "Every rank returned the same, the result for all the numbers. But the result is per rank: run() "
    "gives one for each, and they are added afterwards. Take only the numbers of this `rank`.",
    "one_number": "Each rank takes one number and leaves the rest of its share. A rank has the places rank, "
    "rank + ranks, rank + 2·ranks, … to the end of the list.",
    "rest_left_out": "When the numbers do not divide evenly among the ranks, some at the end belong to nobody in your "
    "answer. A slice with a step, numbers[rank::ranks], takes them all.",
    "blocks": "You take neighbouring numbers. All are there, and the total is right, but rank r should take every "
    "ranks-th number from place r on: numbers[rank::ranks].",
    "own_count": "You divide by the count of this rank's own numbers. That is this rank's mean. Added over ranks it is "
    "about `ranks` times too large. Divide by the count of all numbers.",
    "count_of_ranks": "You divide by the number of ranks. The mean of all numbers has the count of all numbers below "
    "the line, and each part of it too.",
    "rounded_down": "Your results are rounded down to whole numbers: // drops the fraction. Divide with /.",
    "not_divided": "Your results add up to the sum of all numbers, and not to their mean. Divide by how many numbers "
    "there are in all.",
}


class Case(NamedTuple):
    """The answer called once for each rank."""

    numbers: list[int]
    ranks: int
    got: list[float]

    def share(self, rank: int) -> list[int]:
        return [x for place, x in enumerate(self.numbers) if place % self.ranks == rank]

    def parts(self) -> list[float]:
        return [sum(self.share(rank)) / len(self.numbers) for rank in range(self.ranks)]

    def blocks(self) -> list[float]:
        """Neighbours in place of every ranks-th number, where they divide evenly."""
        each = len(self.numbers) // self.ranks
        return [sum(self.numbers[rank * each:][:each]) / len(self.numbers) for rank in range(self.ranks)]

    def gave(self, values: list[float]) -> bool:
        return all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in zip(self.got, values, strict=True))

    def __str__(self) -> str:
        shown = ", ".join(f"{value:.6g}" for value in self.got)
        return f"{self.numbers} on {self.ranks} ranks gave {shown}"


@exercise("0.1", title="a function that runs on every rank", minutes=3, needs="part_of_mean", hints=HINTS,
          mistakes=MISTAKES)  # fmt: skip
def part_of_the_mean(answer: Callable[[int, int, list[int]], float], draw: random.Random) -> Verdict:
    """Rows for a worked example, for lists that divide evenly, for others, and for too few numbers."""
    lists = [([3, 5, 10, 6], 2), *(_even(draw) for _ in range(12)), *(_ragged(draw) for _ in range(12)), ([8, 4], 3)]
    cases = []
    for numbers, ranks in lists:
        got = []
        for rank in range(ranks):
            shown = f"part_of_mean({rank}, {ranks}, {numbers})"
            try:
                value = call(answer, rank, ranks, list(numbers), shown=shown)
            except Broke as broke:
                if rank < len(numbers) or not isinstance(broke.__cause__, ZeroDivisionError):
                    raise
                value = math.nan  # divided by the count of its own numbers, and it has none
            if value is None:
                row = Row("returns this rank's part", False, "a number", f"{shown} gave None")
                return Verdict((row,), "no_result")
            try:
                got.append(float(value))
            except (TypeError, ValueError):
                return Verdict((Row("returns a number", False, "for instance 3.25", f"{shown} gave {value!r}"),))
        cases.append(Case(numbers, ranks, got))
    example, even, ragged, few = cases[0], cases[1:13], cases[13:25], cases[25]
    rows = (
        Row("the example of the text", example.gave(example.parts()), "rank 0: 3.25, rank 1: 2.75", str(example)),
        _row("each rank has its own part", "numbers[rank], numbers[rank + ranks], …", even),
        _row("no number is left out", "the parts add up to the mean, whatever the count", ragged),
        _row("a rank without numbers returns 0", "2 numbers on 3 ranks: 4, 2 and 0", [few]),
    )
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake([example, *even], ragged))


def _row(name: str, expected: str, cases: list[Case]) -> Row:
    broken = sorted((c for c in cases if not c.gave(c.parts())), key=lambda c: len(c.numbers))
    return Row(name, not broken, expected, str(broken[0]) if broken else f"held for {len(cases)} of {len(cases)} lists")


def _mistake(even: list[Case], ragged: list[Case]) -> str:
    """The mistake that explains what all cases show; the plainest one first."""
    cases = even + ragged
    if all(len(set(c.got)) == 1 for c in even):
        return "everything"
    wrong: dict[str, Callable[[Case, int], float]] = {
        "not_divided": lambda c, rank: sum(c.share(rank)),
        "count_of_ranks": lambda c, rank: sum(c.share(rank)) / c.ranks,
        "own_count": lambda c, rank: sum(c.share(rank)) / len(c.share(rank)),
        "one_number": lambda c, rank: c.numbers[rank] / len(c.numbers),
        "rounded_down": lambda c, rank: sum(c.share(rank)) // len(c.numbers),
    }
    for mistake, value in wrong.items():
        if all(c.gave([value(c, rank) for rank in range(c.ranks)]) for c in cases):
            return mistake
    if not all(c.gave(c.parts()) or c.gave(c.blocks()) for c in even):
        return ""
    if all(math.isclose(sum(c.got), sum(c.parts())) for c in ragged):
        return "blocks"
    return "rest_left_out" if any(sum(c.got) < sum(c.parts()) * (1 - 1e-9) for c in ragged) else ""


def _even(draw: random.Random) -> tuple[list[int], int]:
    """At least two numbers for each rank."""
    ranks = draw.randint(2, 4)
    return _distinct(draw, ranks * draw.randint(2, 3)), ranks


def _ragged(draw: random.Random) -> tuple[list[int], int]:
    ranks = draw.randint(2, 4)
    return _distinct(draw, ranks * 2 + draw.randint(1, ranks - 1)), ranks


def _distinct(draw: random.Random, count: int) -> list[int]:
    """All different, and in no order in which two shares could have the same sum."""
    return [2**place + draw.randint(0, 3) * 2**12 for place in draw.sample(range(count), count)]
