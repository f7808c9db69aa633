"""Exercise 1.3: bytes on the wire per update for data, tensor, pipeline and expert parallelism.

The learner writes `bytes_per_update(kind, n, N, G, A, layers)`, the bytes that one rank sends in one update. The
check compares with `course_lib.plan.volumes`, and each wrong answer with what its mistake would give.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

from course_lib.lab.guard import call
from course_lib.lab.model import Row, Verdict, exercise
from course_lib.plan import volumes

HINTS = (
    "Take the kinds one by one, and ask two things of each. What is sent: the gradient, once an update, or an "
    "activation, in every micro-step? And in which operation: all-reduce, all-to-all, or a plain send?",
    "A ring all-reduce of S bytes sends 2(n−1)/n·S from each rank, an all-to-all (n−1)/n·S. TP has four all-reduces of "
    "A in a layer and micro-step, EP four all-to-alls. PP sends A on and a gradient of the same size back.",
    "ring = 2 * (n - 1) / n. DP: ring * G. TP: 4 * layers * N * ring * A. PP: 2 * N * A. EP: 4 * layers * N * "
    "(n - 1) / n * A.",
)

MISTAKES = {
    "no_result": "Your function returned None. Does every kind reach a `return`?",
    "two_S": "You count 2·S for an all-reduce. Each rank keeps one part of n at home in both halves of the ring: it "
    "sends 2(n−1)/n·S. For two ranks that is half as much.",
    "forgets_N": "You forget N where activations travel. Tensor, pipeline and expert parallelism communicate in every "
    "micro-step: accumulation makes that N times as much in an update. Only the gradient's reduction is done once.",
    "N_for_DP": "You multiply the data-parallel bytes by N. With accumulation the gradient is added up locally and "
    "sent once, after the last micro-step. That is one of the reasons to accumulate.",
    "forward_only": "You count the forward pass only. What crosses the wire in forward has a gradient that crosses it "
    "again in backward, and of the same size.",
    "all_to_all_as_all_reduce": "You count an all-to-all like an all-reduce. It does not add up and hand out again: "
    "every byte travels once, so each rank sends (n−1)/n·S, half as much.",
    "keeps_nothing": "Your all-to-all sends all of A away. If tokens spread evenly, one part of n is meant for this "
    "rank and stays: (n−1)/n·A travels.",
    "forgets_layers": "You count one layer. Tensor and expert parallelism communicate inside every layer of this rank.",
    "layers_for_PP": "You multiply the pipeline's bytes by the number of layers. A stage sends what comes out of its "
    "*last* layer; in between nothing leaves the rank.",
}

KINDS = ("DP", "TP", "PP", "EP")


class Case(NamedTuple):
    kind: str
    n: int
    N: int
    G: int
    A: int
    layers: int
    got: float

    @property
    def expected(self) -> float:
        _, n, N, G, A, L, _ = self
        return {
            "DP": volumes.data_parallel_bytes(G, n, N),
            "TP": volumes.tensor_parallel_bytes(A, n, L, N),
            "PP": volumes.pipeline_parallel_bytes(A, n, N),
            "EP": volumes.expert_parallel_bytes(A, n, L, N),
        }[self.kind]

    def gave(self, value: float) -> bool:
        """Whole bytes are right too, however they are rounded."""
        return math.isclose(self.got, value, rel_tol=1e-6, abs_tol=1)

    def __str__(self) -> str:
        return f'bytes_per_update("{self.kind}", {", ".join(map(str, self[1:-1]))}) gave {self.got:,.0f}'


@exercise("1.3", title="bytes on the wire per update", minutes=8, needs="bytes_per_update", hints=HINTS,
          mistakes=MISTAKES)  # fmt: skip
def bytes_per_update(answer: Callable[[str, int, int, int, int, int], float], draw: random.Random) -> Verdict:
    """A row for each kind of parallelism: a worked example and ten drawn cases."""
    cases = []
    for kind in KINDS:
        for case in [(4, 8, 1000, 100, 6), *(_drawn(draw) for _ in range(10))]:
            arguments = (kind, *case)
            got = call(answer, *arguments, shown=f"bytes_per_update{arguments}")
            if got is None:
                row = Row("returns bytes", False, "a number", f"bytes_per_update{arguments} gave None")
                return Verdict((row,), "no_result")
            try:
                cases.append(Case(*arguments, float(got)))
            except (TypeError, ValueError):
                row = Row("returns a number", False, "bytes", f"bytes_per_update{arguments} gave {got!r}")
                return Verdict((row,))
    rows = tuple(_row(kind, [c for c in cases if c.kind == kind]) for kind in KINDS)
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(cases))


def _row(kind: str, cases: list[Case]) -> Row:
    name = {"DP": "data parallel", "TP": "tensor parallel", "PP": "pipeline parallel", "EP": "expert parallel"}[kind]
    broken = [c for c in cases if not c.gave(c.expected)]
    seen = str(broken[0]) if broken else f"held in {len(cases)} cases"
    return Row(name, not broken, f'bytes_per_update("{kind}", 4, 8, 1000, 100, 6) is {cases[0].expected:,.0f}', seen)


def _mistake(cases: list[Case]) -> str:
    """What explains every kind that is wrong. A mistake may show in one kind and not in another."""
    found = set()
    for kind in KINDS:
        mine = [c for c in cases if c.kind == kind]
        if all(c.gave(c.expected) for c in mine):
            continue
        explained = [name for name, off in _factors(kind).items() if all(c.gave(c.expected * off(c)) for c in mine)]
        if not explained:
            return ""
        found.add(explained[0])
    return next(name for name in MISTAKES if name in found)


def _factors(kind: str) -> dict[str, Callable[[Case], float]]:
    """By how much each mistake is off, for the kinds in which it can be made."""
    ring: Callable[[Case], float] = lambda c: c.n / (c.n - 1)  # noqa: E731 - one line says it best
    return {
        "DP": {"two_S": ring, "N_for_DP": lambda c: c.N},
        "TP": {"two_S": ring, "forgets_N": lambda c: 1 / c.N, "forward_only": lambda c: 0.5,
               "forgets_layers": lambda c: 1 / c.layers},
        "PP": {"forgets_N": lambda c: 1 / c.N, "forward_only": lambda c: 0.5, "layers_for_PP": lambda c: c.layers},
        "EP": {"keeps_nothing": ring, "forgets_N": lambda c: 1 / c.N, "forward_only": lambda c: 0.5,
               "all_to_all_as_all_reduce": lambda c: 2, "forgets_layers": lambda c: 1 / c.layers},
    }[kind]  # fmt: skip


def _drawn(draw: random.Random) -> tuple[int, int, int, int, int]:
    """Numbers in which no two mistakes coincide: N and the layers are different odd numbers, at least 3."""
    N, layers = draw.sample([3, 5, 7, 9, 11, 13], 2)
    n = draw.choice([3, 4, 6, 8, 16])
    return n, N, 1000 * draw.randint(50, 900), 1000 * draw.randint(1, 40), layers
