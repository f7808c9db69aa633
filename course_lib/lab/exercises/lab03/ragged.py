"""Exercise 3.2: the loss of a window with ragged token counts.

The learner writes `window_factors(my_counts, ranks, all_reduce_sum) -> list[float]`; every rank calls it once, before
the first forward of a window:

- `my_counts[i]` is the number of tokens that count in this rank's micro-batch i.
- `all_reduce_sum(number)` returns the sum of the number over all ranks. It is a collective.
- Micro-batch i then runs `(factor[i] * summed_loss).backward()`, where `summed_loss` is the *sum* over its tokens.
  After the last one the gradients are averaged over the ranks: a mean-reducing all-reduce, as DDP's.
- The update must be that of the mean loss over all tokens of the window, on all ranks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

from course_lib.lab.exercises.lab02.replay import Exchange, Outcome, calls_text, replay
from course_lib.lab.guard import call
from course_lib.lab.model import Row, Verdict, exercise

HINTS = (
    "Write down what the optimizer should see: the sum of all tokens' gradients, divided by the number of all tokens. "
    "The backward passes add the sums; the all-reduce then divides by `ranks`. What is left for you to divide by?",
    "Every token of the window must weigh the same, in whichever micro-batch and on whichever rank it is. So there is "
    "one factor for all. Its denominator is the number of tokens on all ranks; the all-reduce's own division has to be "
    "undone.",
    "total = all_reduce_sum(sum(my_counts)); return [ranks / total] * len(my_counts).",
)

MISTAKES = {
    "not_a_list": "One factor for each micro-batch is wanted, as a list.",
    "for_mean_losses": "Your factors are meant for *mean* losses: they multiply by the number of tokens again. What is "
    "given is the *sum* over the tokens of a micro-batch, so a token's weight is the factor itself.",
    "mean_of_means": "You take the mean of means: a token in a short micro-batch weighs more than one in a long one, "
    "so the update depends on how the window was cut. Divide sums by one count, that of the whole window.",
    "per_rank": "Your denominator is this rank's own count. The all-reduce then gives every rank the same weight, "
    "so the tokens of a rank with few of them weigh more. Ask for the count of all ranks.",
    "divides_twice": "The update is too small by a whole factor. The all-reduce divides by `ranks` already, and a "
    "count over the whole window leaves nothing to divide by N.",
    "never_divides": "Your factors do not depend on the number of tokens, so the update grows with the window.",
    "hangs": "Some ranks call all_reduce_sum and others do not, or not as often. They wait for each other for ever. "
    "Call it once, whatever your own counts are.",
}


class Case(NamedTuple):
    """One window: `counts[rank][i]`, and what each rank returned."""

    counts: list[list[int]]
    outcomes: list[Outcome]

    @property
    def ranks(self) -> int:
        return len(self.counts)

    @property
    def total(self) -> int:
        return sum(map(sum, self.counts))

    @property
    def hangs(self) -> bool:
        return any(o.hangs for o in self.outcomes) or len({o.calls for o in self.outcomes}) > 1

    def right(self) -> bool:
        return self.holds(lambda rank, i: self.ranks / self.total)

    def holds(self, rule: Callable[[int, int], float]) -> bool:
        """Whether `rule(rank, i)` is the factor everywhere. Without tokens the loss is 0, and any number will do."""
        return not self.hangs and all(
            abs(factor - rule(rank, i)) <= 1e-6 * abs(rule(rank, i)) if self.counts[rank][i] else math.isfinite(factor)
            for rank, o in enumerate(self.outcomes) for i, factor in enumerate(o.result))  # fmt: skip

    def __str__(self) -> str:
        if self.hangs:
            return f"counts {self.counts}: {calls_text(self.outcomes)}"
        found = [[float(f"{factor:.3g}") for factor in o.result] for o in self.outcomes]
        right = f"{self.ranks}/{self.total} = {self.ranks / self.total:.3g}"
        return f"counts {self.counts} gave {found}, and {right} is right"


@exercise("3.2", title="the loss of a window", minutes=8, needs="window_factors", hints=HINTS, mistakes=MISTAKES)
def normalise_a_window(answer: Callable, draw: random.Random) -> Verdict:
    """Rows over windows whose counts are equal, ragged across micro-batches, and ragged across ranks."""
    cases: dict[str, list[Case]] = {}
    for kind in ("equal", "micro", "ranks"):
        cases[kind] = []
        for _ in range(8):
            played = _played(answer, _counts(draw, kind))
            if isinstance(played, Row):
                return Verdict((played,), "not_a_list")
            cases[kind].append(played)
    everything = [case for kind in cases.values() for case in kind]
    rows = (
        _row("every rank calls all_reduce_sum alike", "the same number of calls", everything, lambda c: not c.hangs),
        _row("equal counts", "ranks / all tokens", cases["equal"], Case.right),
        _row("ragged micro-batches", "every token weighs the same", cases["micro"], Case.right),
        _row("ragged ranks", "on every rank too", cases["ranks"], Case.right),
    )
    if all(row.ok for row in rows):
        for kind, name in (("empty", "a micro-batch without tokens"), ("silent", "a rank without tokens")):
            played = _played(answer, _counts(draw, kind))
            held = isinstance(played, Case) and played.right()
            rows += (Row(name, held, "nothing changes for the others", str(played)),)
            everything += [played] if isinstance(played, Case) else []
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(everything))


def _mistake(cases: list[Case]) -> str:
    """The rule that all cases follow; a window that hangs first."""
    if any(c.hangs for c in cases):
        return "hangs"
    rules: dict[str, tuple[Callable[[Case], Callable[[int, int], float]], ...]] = {
        "mean_of_means": (
            lambda c: lambda r, i: 1 / (len(c.counts[r]) * c.counts[r][i]),
            lambda c: lambda r, i: c.ranks / (len(c.counts[r]) * sum(counts[i] for counts in c.counts)),
            lambda c: lambda r, i: 1 / c.counts[r][i],
            lambda c: lambda r, i: 1 / (c.ranks * len(c.counts[r]) * c.counts[r][i]),
            lambda c: lambda r, i: c.ranks / sum(counts[i] for counts in c.counts)),
        "for_mean_losses": (
            lambda c: lambda r, i: c.ranks * c.counts[r][i] / c.total,
            lambda c: lambda r, i: c.counts[r][i] / c.total,
            lambda c: lambda r, i: c.counts[r][i] / sum(c.counts[r])),
        "per_rank": (lambda c: lambda r, i: 1 / sum(c.counts[r]),),
        "divides_twice": (
            lambda c: lambda r, i: 1 / c.total,
            lambda c: lambda r, i: c.ranks / c.total / len(c.counts[r]),
            lambda c: lambda r, i: 1 / c.total / len(c.counts[r]),
            lambda c: lambda r, i: 1 / sum(c.counts[r]) / len(c.counts[r]),
            lambda c: lambda r, i: 1 / sum(c.counts[r]) / c.ranks),
        "never_divides": (lambda c: lambda r, i: 1.0, lambda c: lambda r, i: 1 / len(c.counts[r])),
    }  # fmt: skip
    for name, variants in rules.items():
        if any(all(c.holds(rule(c)) for c in cases) for rule in variants):
            return name
    return ""


def _row(name: str, expected: str, cases: list[Case], holds: Callable[[Case], bool]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: (c.ranks, len(c.counts[0])))
    seen = str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} windows"
    return Row(name, not broken, expected, seen)


def _counts(draw: random.Random, kind: str) -> list[list[int]]:
    """Token counts of a window of two to four micro-steps on two to four ranks."""
    ranks, N = draw.randint(2, 4), draw.randint(2, 4)
    if kind == "equal":
        return [[draw.randint(3, 60)] * N] * ranks
    if kind == "micro":
        row = draw.sample(range(1, 60), N)
        return [draw.sample(row, N) for _ in range(ranks)]
    counts = [draw.sample(range(1 + 60 * rank, 60 + 60 * rank), N) for rank in range(ranks)]
    draw.shuffle(counts)
    if kind == "empty":
        counts[0][0] = 0
    if kind == "silent":
        counts[0] = [0] * N
    return counts


def _played(answer: Callable, counts: list[list[int]]) -> Case | Row:
    """The answer called on every rank; a row when what it returns has not the right form."""
    ranks, odd = len(counts), []

    def play(rank: int, exchange: Exchange) -> list[float]:
        def all_reduce_sum(number: float) -> float:
            return sum(exchange(number + 0))

        mine = list(counts[rank])
        shown = f"window_factors({mine}, {ranks}, all_reduce_sum)"
        got = call(answer, mine, ranks, all_reduce_sum, shown=shown)
        try:
            factors = [float(factor) for factor in got]
        except (TypeError, ValueError):
            factors = []
        if len(factors) != len(counts[rank]):
            odd.append(f"{shown} gave {got!r}")
        return factors

    outcomes = replay(play, ranks)
    if odd:
        return Row("returns one factor for each micro-batch", False, "a list of numbers", odd[0])
    return Case(counts, outcomes)
