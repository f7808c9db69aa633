"""Exercise 1.2: bytes per rank of parameters, gradients and optimizer state, for ZeRO stages 0 to 3.

The learner writes `bytes_per_rank(parameters, D, stage)` and returns three byte counts. Mixed precision: bf16
weights and gradients, and an optimizer that keeps an fp32 copy of the weights and Adam's two fp32 moments.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

from course_lib.lab.guard import call
from course_lib.lab.model import Row, Verdict, exercise
from course_lib.plan.memory import states

HINTS = (
    "Begin with stage 0, where every rank holds everything. How many bytes does one parameter need as a weight, as a "
    "gradient, and in the optimizer? Multiply each by the number of parameters.",
    "The optimizer keeps three fp32 numbers of 4 bytes a parameter: a master copy of the weight, and Adam's m and v. "
    "Then divide by D: the optimizer state from stage 1 on, the gradients from stage 2 on, the weights at stage 3.",
    "weights = 2 * parameters / (D if stage >= 3 else 1); gradients likewise with stage >= 2; optimizer = "
    "12 * parameters / (D if stage >= 1 else 1). Return the three.",
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end?",
    "forgets_master": "Your optimizer state has 8 bytes a parameter: Adam's two moments. With bf16 weights it "
    "also keeps an fp32 master copy, 4 bytes more. Without it small updates are rounded away.",
    "parameters_at_2": "You divide the weights at stage 2. That stage divides the gradients, on top of the optimizer "
    "state of stage 1. Every rank still holds all weights; only stage 3 divides them too.",
    "one_stage_early": "Your stages are one ahead. Stage 1 divides the optimizer state only, stage 2 the gradients "
    "too, stage 3 the weights too.",
    "gradients_at_3": "At stage 2 your gradients are whole. Dividing them is what stage 2 adds.",
    "never_divided": "You return the same for every stage. From stage 1 on the optimizer state is divided over the D "
    "ranks, from stage 2 the gradients, at stage 3 the weights.",
    "all_divided": "You divide everything by D at every stage above 0. Each stage adds one kind: first the optimizer "
    "state, then the gradients, then the weights.",
    "only_its_own": "At each stage you divide one kind only. A stage keeps what the stages below it divide: ask for "
    "`stage >= 1`, not for `stage == 1`.",
    "all_fp32": "You count 4 bytes for weights and gradients. Here both are bf16, 2 bytes, and the fp32 copy belongs "
    "to the optimizer. The total is the same at stage 0, and only there.",
}

Parts = tuple[float, float, float]


class Case(NamedTuple):
    parameters: int
    D: int
    stage: int
    got: Parts

    def gave(self, weights: float, gradients: float, optimizer: float) -> bool:
        return all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(self.got, (weights, gradients, optimizer)))

    def expected(self) -> Parts:
        return states(self.parameters, stage=self.stage, D=self.D)

    def divided(self, sizes: tuple[int, int, int], stages: tuple[int, int, int]) -> bool:
        """Whether these are bytes of `sizes` a parameter, each kind divided from the stage given for it on."""
        return self.gave(*(self.parameters * size / (self.D if self.stage >= stage else 1)
                           for size, stage in zip(sizes, stages)))  # fmt: skip

    def __str__(self) -> str:
        shown = ", ".join(f"{value:,.0f}" for value in self.got)
        return f"bytes_per_rank({self.parameters}, {self.D}, {self.stage}) gave ({shown})"


@exercise("1.2", title="bytes per rank by ZeRO stage", minutes=6, needs="bytes_per_rank", hints=HINTS,
          mistakes=MISTAKES)  # fmt: skip
def bytes_per_rank(answer: Callable[[int, int, int], Parts], draw: random.Random) -> Verdict:
    """A row for each stage, and one for a single rank, where all stages are the same."""
    models = [(draw.randint(1, 99) * D, D) for D in (draw.choice([2, 4, 8, 16, 64]) for _ in range(8))]
    arguments = [(1000, 8, stage) for stage in range(4)]
    arguments += [(P, D, stage) for stage in range(4) for P, D in models] + [(50, 1, stage) for stage in range(4)]
    cases = []
    for each in arguments:
        got = call(answer, *each, shown=f"bytes_per_rank{each}")
        if got is None:
            row = Row("returns three byte counts", False, "(weights, gradients, optimizer)", f"{each} gave None")
            return Verdict((row,), "no_result")
        try:
            weights, gradients, optimizer = (float(value) for value in got)
        except (TypeError, ValueError):
            row = Row("returns three byte counts", False, "(weights, gradients, optimizer)", f"{each} gave {got!r}")
            return Verdict((row,))
        cases.append(Case(*each, (weights, gradients, optimizer)))
    many = [c for c in cases if c.D > 1]
    rows = tuple(_row(f"stage {stage}: {words}", expected, [c for c in many if c.stage == stage])
                 for stage, words, expected in (
                     (0, "everything on every rank", "1000 parameters on 8 ranks: 2000, 2000, 12000"),
                     (1, "optimizer state divided", "1000 parameters on 8 ranks: 2000, 2000, 1500"),
                     (2, "gradients divided too", "1000 parameters on 8 ranks: 2000, 250, 1500"),
                     (3, "weights divided too", "1000 parameters on 8 ranks: 250, 250, 1500")))  # fmt: skip
    rows += (_row("one rank holds everything", "the same at every stage", [c for c in cases if c.D == 1]),)
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(many))


def _row(name: str, expected: str, cases: list[Case]) -> Row:
    broken = [c for c in cases if not c.gave(*c.expected())]
    return Row(name, not broken, expected, str(broken[0]) if broken else f"held for {len(cases)} models")


def _mistake(cases: list[Case]) -> str:
    mixed, zero = (2, 2, 12), (3, 2, 1)
    wrong = {
        "forgets_master": ((2, 2, 8), zero),
        "all_fp32": ((4, 4, 8), zero),
        "parameters_at_2": (mixed, (2, 2, 1)),
        "one_stage_early": (mixed, (2, 1, 0)),
        "gradients_at_3": (mixed, (3, 3, 1)),
        "never_divided": (mixed, (4, 4, 4)),
        "all_divided": (mixed, (1, 1, 1)),
    }
    for mistake, (sizes, stages) in wrong.items():
        if all(c.divided(sizes, stages) for c in cases):
            return mistake
    alone = lambda c, stage: c.D if c.stage == stage else 1  # noqa: E731
    if all(c.gave(*(c.parameters * size / alone(c, stage) for size, stage in zip(mixed, zero))) for c in cases):
        return "only_its_own"
    return ""
