"""Exercise 13.3: plan the run.

The learner writes `best_layout(gpus, B, b, micro_s, data_s, memory, limit)`: (t, p, D, N) of the fastest layout that
fits, or None where none does.

- t is 1, 2, 4 or 8 (tensor parallelism stays inside a node of 8), p any number of stages, t·p·D = gpus.
- N = B/(b·D) micro-batches a replica, a whole number.
- `micro_s(t, p)` are seconds of one micro-batch on one stage, so that 1F1B takes (N + p − 1)·micro_s(t, p);
  `data_s(t, p, D)` are seconds once an update. `memory(t, p, D)` must not be above `limit`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from course_lib.lab.guard import call
from course_lib.lab.model import Row, Verdict, exercise

HINTS = (
    "List what there is to choose from first: t, then p, then D follows from gpus, and N from B, b and D. Which of the "
    "combinations cannot be? For those that can: how long is one update?",
    "Two loops, over t in (1, 2, 4, 8) and p from 1 to gpus // t. Skip what does not divide: gpus by t·p, B by b·D. "
    "Skip what needs more than `limit`. Keep the one with the smallest (N + p − 1)·micro_s(t, p) + data_s(t, p, D): "
    "the last micro-batch enters after N − 1 others and then still has p stages to go through.",
    "best = None; for t in (1, 2, 4, 8): for p in range(1, gpus // t + 1): if gpus % (t * p): continue; D = gpus // (t "
    "* p); if B % (b * D): continue; if memory(t, p, D) > limit: continue; N = B // (b * D); s = (N + p - 1) * "
    "micro_s(t, p) + data_s(t, p, D); keep (s, (t, p, D, N)) if it is the smallest. Return what was kept, or None.",
)

MISTAKES = {
    "no_result": "Your function returned None although something fits. Is there a `return` at its end?",
    "forgets_the_bubble": "You count N micro-batches and forget the bubble. The last one enters a pipeline of p stages "
    "behind N − 1 others and goes through p stages: (N + p − 1) turns in all.",
    "one_after_the_other": "N·p turns are those of a pipeline in which each micro-batch waits until the one before has "
    "left it. They follow each other stage by stage: the last one enters behind N − 1 others and then goes through p "
    "stages, (N + p − 1) turns in all.",
    "floors_n": "B must be b·D·N exactly. With `//` alone samples are dropped: the update is another one than was "
    "asked for.",
    "ignores_memory": "The fastest layout you name does not fit its GPUs. Skip what needs more than `limit`.",
    "leaves_gpus_idle": "t·p·D is not `gpus`: some GPUs of your layout do nothing. Skip what does not divide.",
    "data_every_micro_batch": "You pay the data-parallel traffic for every micro-batch. Gradients are reduced once an "
    "update: that is what accumulation is for.",
    "most_replicas": "You take the largest D that fits. It often is the fastest, but not always: fewer replicas mean "
    "more micro-batches and a smaller bubble, and other traffic. Let the seconds decide.",
    "t_up_to_gpus": "Your tensor-parallel groups are larger than a node of 8. Their traffic is on the critical path of "
    "every layer and needs the wires inside a node: t is 1, 2, 4 or 8.",
    "divides_by_p_again": "micro_s(t, p) is of one *stage* already, a p-th of the model. Do not divide it by p once "
    "more.",
    "multiplies_by_p": "The turns are right, but each is as long as micro_s(t, p) says: that is one micro-batch on one "
    "*stage*. The p stages work at the same time, so p is in (N + p − 1) already.",
    "powers_of_two": "p may be any number of stages that divides the GPUs, 3 or 6 too. Powers of two are a habit.",
    "below_the_limit": "A layout that needs `limit` exactly still fits: memory must not be *above* it.",
    "nothing_fits": "Where nothing fits, the answer is None: not an exception, and no layout either.",
}  # fmt: skip

Layout = tuple[int, int, int, int]
MOST_CASES = 60


@dataclass(frozen=True)
class Case:
    """One run to plan. Costs are drawn for each (t, p), so that no formula but the one asked for finds the best."""

    gpus: int
    B: int
    b: int
    limit: float
    micro: dict[tuple[int, int], float]
    data: dict[tuple[int, int], float]
    bytes: dict[tuple[int, int], float]
    got: Any = field(default=None, compare=False)

    def micro_s(self, t: int, p: int) -> float:
        return self._at(self.micro, "micro_s", t, p)

    def data_s(self, t: int, p: int, D: int) -> float:
        return self._at(self.data, "data_s", t, p, D)

    def memory(self, t: int, p: int, D: int) -> float:
        return math.inf if D == 0 else self._at(self.bytes, "memory", t, p, D)

    def functions(self) -> tuple[Callable, Callable, Callable]:
        """`micro_s`, `data_s` and `memory` as plain functions, which a grader's sandbox can call."""
        return (lambda t, p: self.micro_s(t, p), lambda t, p, D: self.data_s(t, p, D),
                lambda t, p, D: self.memory(t, p, D))

    def _at(self, table: dict[tuple[int, int], float], name: str, t: Any, p: Any, D: Any = 1) -> float:
        if (t, p) in table and D >= 1:
            return table[t, p]
        rule = "D is 1 at least"
        if (t, p) not in table:
            rule = f"p is a whole number of 1 to {self.gpus}" if (t, 1) in table else "t is 1, 2, 4 or 8"
        raise ValueError(f"{name}({t}, {p}{f', {D}' if name != 'micro_s' else ''}): {rule}")

    def choices(self, whole: bool = True, idle: bool = False, most: int = 8,
                fits: bool = True) -> Iterator[Layout]:
        """Every layout that can be; with other rules, those that somebody takes who forgets one."""
        for t in (t for t in (1, 2, 4, 8, 16, 32, 64) if t <= min(most, self.gpus)):
            for p in range(1, self.gpus // t + 1):
                if self.gpus % (t * p) and not idle:
                    continue
                D = self.gpus // (t * p)
                N = self.B // (self.b * D)
                if N < 1 or (self.B % (self.b * D) and whole) or (self.bytes[t, p] > self.limit and fits):
                    continue
                yield t, p, D, N

    def seconds(self, layout: Layout) -> float:
        t, p, _, N = layout
        return (N + p - 1) * self.micro[t, p] + self.data[t, p]

    def right(self) -> Layout | None:
        return min(self.choices(), key=self.seconds, default=None)

    def ok(self) -> bool:
        return self.got == self.right()

    def __str__(self) -> str:
        said = f"{self.gpus} GPUs, B = {self.B}, b = {self.b}: gave {self.got}"
        if (best := self.right()) is None:
            return f"{said}, and nothing fits"
        can = self.got in list(self.choices())
        took = f"takes {self.seconds(self.got):.3g} s" if can else "is none of those that can be"
        return f"{said}, which {took}; {best} takes {self.seconds(best):.3g} s"


_WRONG: dict[str, Callable[[Case], Layout | None]] = {
    "forgets_the_bubble": lambda c: min(c.choices(), default=None,
                                        key=lambda x: x[3] * c.micro[x[:2]] + c.data[x[:2]]),
    "one_after_the_other": lambda c: min(c.choices(), default=None,
                                         key=lambda x: x[3] * x[1] * c.micro[x[:2]] + c.data[x[:2]]),
    "floors_n": lambda c: min(c.choices(whole=False), key=c.seconds, default=None),
    "ignores_memory": lambda c: min(c.choices(fits=False), key=c.seconds, default=None),
    "leaves_gpus_idle": lambda c: min(c.choices(idle=True), key=c.seconds, default=None),
    "data_every_micro_batch": lambda c: min(c.choices(), default=None, key=lambda x: c.seconds(x)
                                            + (x[3] - 1) * c.data[x[:2]]),
    "most_replicas": lambda c: min(c.choices(), key=lambda x: (-x[2], c.seconds(x)), default=None),
    "t_up_to_gpus": lambda c: min(c.choices(most=64), key=c.seconds, default=None),
    "divides_by_p_again": lambda c: min(c.choices(), default=None, key=lambda x: (x[3] + x[1] - 1)
                                        * c.micro[x[:2]] / x[1] + c.data[x[:2]]),
    "multiplies_by_p": lambda c: min(c.choices(), default=None, key=lambda x: (x[3] + x[1] - 1)
                                     * c.micro[x[:2]] * x[1] + c.data[x[:2]]),
    "powers_of_two": lambda c: _best(c, lambda x: x[1].bit_count() == 1),
    "below_the_limit": lambda c: _best(c, lambda x: c.bytes[x[:2]] < c.limit),
}  # fmt: skip
"""What somebody answers who makes one mistake."""

_NEAR: dict[str, Callable[[Case], Layout | None]] = {
    "p up to 8": lambda c: _best(c, lambda x: x[1] <= 8),
    "in one node": lambda c: _best(c, lambda x: x[0] * x[1] <= 8),
    "t = 1": lambda c: _best(c, lambda x: x[0] == 1),
    "p = 1": lambda c: _best(c, lambda x: x[1] == 1),
    "cut": lambda c: _best(c, lambda x: x[0] * x[1] > 1),
    "copies": lambda c: _best(c, lambda x: x[2] > 1),
    "N + p": lambda c: min(c.choices(), key=lambda x: c.seconds(x) + c.micro[x[:2]], default=None),
    "no traffic": lambda c: min(c.choices(), key=lambda x: c.seconds(x) - c.data[x[:2]], default=None),
    "the longer": lambda c: min(c.choices(), default=None, key=lambda x: max(c.seconds(x) - c.data[x[:2]],
                                                                             c.data[x[:2]])),
    "bubble of the step on top": lambda c: min(c.choices(), default=None, key=lambda x: x[3] * c.micro[x[:2]] * (
        1 + (x[1] - 1) / (x[3] + x[1] - 1)) + c.data[x[:2]]),
}  # fmt: skip
"""Other wrong rules, which no hint is written for. They too must differ from the right one in some case."""


def _best(case: Case, keep: Callable[[Layout], bool]) -> Layout | None:
    return min(filter(keep, case.choices()), key=case.seconds, default=None)


@exercise("13.3", title="plan the run", minutes=10, needs="best_layout", hints=HINTS, mistakes=MISTAKES)
def choose_the_layout(answer: Callable, draw: random.Random) -> Verdict:
    """Rows over clusters with drawn costs, so many that each mistake shows, and one in which nothing fits."""
    cases, none = _drawn(draw), _case(draw, limit=0.0)
    asked = []
    for case in (*cases, none):
        shown = f"best_layout({case.gpus}, {case.B}, {case.b}, micro_s, data_s, memory, limit)"
        try:
            got = call(answer, case.gpus, case.B, case.b, *case.functions(), case.limit, shown=shown)
        except Exception as broke:
            if case is none and not isinstance(broke, NotImplementedError):
                got = str(broke)
            else:
                raise
        if case is not none and got is not None and not _is_layout(got):
            return Verdict((Row("returns (t, p, D, N)", False, "four whole numbers", f"{shown} gave {str(got)[:80]}"),))
        asked.append(replace(case, got=tuple(got) if _is_layout(got) else got))
    *fitting, nothing = asked
    if all(c.got is None for c in fitting):
        return Verdict((Row("returns (t, p, D, N)", False, "four whole numbers", "gave None every time"),), "no_result")
    rows = (_row("layouts of all GPUs, of the whole batch, that fit", "one of those that can be", fitting,
                 lambda c: c.got in list(c.choices())),
            _row("the fastest of them", "the smallest (N + p − 1)·micro_s + data_s", fitting, Case.ok),
            Row("nothing fits", nothing.got is None, "None", str(nothing.got)[:120]))  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(fitting, nothing))


def _drawn(draw: random.Random) -> list[Case]:
    """Cases until every wrong rule differs from the right one in one at least, and every mistake from every other. In
    some the best layout needs all of the limit."""
    cases: list[Case] = []
    alike = {*combinations(("right", *_WRONG), 2), *(("right", name) for name in _NEAR)}
    while len(cases) < MOST_CASES and (alike or len(cases) < 6):
        case = _case(draw)
        if (right := case.right()) is None:
            continue
        if draw.random() < 0.3:
            case = replace(case, limit=case.bytes[right[:2]])
        given = {"right": right} | {name: wrong(case) for name, wrong in (_WRONG | _NEAR).items()}
        told = {pair for pair in alike if given[pair[0]] != given[pair[1]]}
        if told or len(cases) < 6:
            cases.append(case)
            alike -= told
    return cases


def _case(draw: random.Random, limit: float | None = None) -> Case:
    gpus = draw.choice([8, 16, 24, 32, 64])
    b = draw.choice([1, 2, 4])
    B = b * draw.choice([gpus, 2 * gpus, 4 * gpus, gpus + gpus // 2, 3 * gpus // 4])
    micro, data, held = {}, {}, {}
    for t in (1, 2, 4, 8, 16, 32, 64):
        for p in range(1, gpus + 1):
            micro[t, p] = draw.uniform(0.7, 1.3) / (t * p) * (1 + 0.05 * (t - 1) * (t <= 8))
            data[t, p] = draw.uniform(0.0, 0.6) / (t * p) ** 0.3
            held[t, p] = draw.uniform(0.6, 1.2) * 120 / (t * p)
    return Case(gpus, B, b, draw.choice([20.0, 40.0, 80.0, 160.0]) if limit is None else limit, micro, data, held)


def _is_layout(got: Any) -> bool:
    return isinstance(got, tuple | list) and len(got) == 4 and all(
        hasattr(x, "__index__") and not isinstance(x, bool) for x in got)


def _mistake(cases: list[Case], nothing: Case) -> str:
    """The mistake whose answers are those that were given."""
    if all(c.ok() for c in cases):
        return "nothing_fits"
    return next((key for key, wrong in _WRONG.items() if all(c.got == wrong(c) for c in cases)), "")


def _row(name: str, expected: str, cases: list[Case], holds: Callable[[Case], bool]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: c.gpus)
    return Row(name, not broken, expected, str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} runs")
