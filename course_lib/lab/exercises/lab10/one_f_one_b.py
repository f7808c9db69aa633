"""Exercise 10.1: generate 1F1B.

The learner writes `one_f_one_b(p, m, rank)`: the words of what one of p ranks does with m micro-batches, in order.

- min(p−1−rank, m) forwards to warm up; then one forward and one backward in turn, while there are forwards; then the
  backwards that are left; then `reduce0`, the reduction of the stage's gradient over its replicas.
- Stage r lies on rank r. m may be smaller than p.

What comes back is judged by what it does: it is complete, it runs, it keeps no more than min(p−r, m) activations, and
with equal stages it takes (m+p−1)·(F+B). Mistakes are recognised by the number of forwards before the first backward.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from course_lib.lab.guard import call
from course_lib.lab.model import Row, Verdict, exercise
from course_lib.lab.workbench.pipeline_words import is_words, schedule_of
from course_lib.schedule.action import Schedule, ScheduleError
from course_lib.schedule.check import check
from course_lib.simulate.pipeline import Costs, predict

HINTS = (
    "Take p = 4 and m = 8 and write down what rank 3 does, then rank 2. How many forwards does a rank do before its "
    "first backward can possibly have its input? How does that depend on the rank?",
    "Three loops: `warm` forwards; for the other m − warm forwards, each followed by the oldest backward that is "
    "still to do; then the `warm` backwards that are left. After all of them, on every rank, one reduce0.",
    'warm = min(p - 1 - rank, m); words = [f"F{i}" for i in range(warm)]; for i in range(warm, m): append f"F{i}" and '
    'f"B{i - warm}"; for i in range(m - warm, m): append f"B{i}"; append "reduce0"; return words.',
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end?",
    "one_too_many": "One forward too many to warm up. After the warm-up a rank does a forward *and then* a backward, "
    "so that the last rank needs no warm-up at all. Yours keeps one activation more than it has to.",
    "one_too_few": "One forward too few to warm up. The backward of micro-batch 0 then waits on a rank that could "
    "have done another forward meanwhile, and all of its backwards come late.",
    "no_warmup": "Without a warm-up a rank waits for the backward of each micro-batch before it begins the next: only "
    "one rank computes at a time.",
    "gpipe": "All forwards come before all backwards: that is GPipe. It takes as long, and keeps the activations of "
    "all m micro-batches.",
    "same_on_every_rank": "Every rank of yours warms up alike. A rank further down the pipeline gets its first "
    "gradient sooner: the last one right after its first forward.",
    "no_cooldown": "Backwards are missing. After the last forward as many are left as there were forwards to warm up.",
    "reduce_in_the_cooldown": "A rank never reduces. The last rank has no cool-down: what stands inside that loop "
    "never happens there, its replicas drift apart, and nobody notices. Put the reduction behind the loops.",
    "no_reduce": "No rank reduces its gradient. Replicas of a stage would drift apart: the list ends with reduce0.",
    "reduces_early": "The gradient is reduced before the last backward, whose share is then never reduced. It belongs "
    "at the very end.",
    "ignores_m": "It is right while m ≥ p. With fewer micro-batches than ranks there are not p−1−rank forwards to "
    "warm up with.",
}


class Case(NamedTuple):
    """One pipeline. `lists` is what came back for each rank; `schedule` and `step_s` where it can be read and run."""

    p: int
    m: int
    lists: list[list[str]]
    schedule: Schedule | None = None
    peaks: tuple[int, ...] = ()
    slower: float = 0.0
    fault: str = ""

    def warm(self) -> list[int]:
        """Forwards before the first backward, on each rank."""
        return [next((k for k, word in enumerate(words) if word.startswith("B")), len(words)) for words in self.lists]

    def bound(self, rank: int) -> int:
        return min(self.p - rank, self.m)

    def slim(self) -> bool:
        return all(peak <= self.bound(r) for r, peak in enumerate(self.peaks))

    def late(self) -> bool:
        return self.slower > 1 + 1e-9

    def __str__(self) -> str:
        said = f"p = {self.p}, m = {self.m}"
        if self.fault:
            return f"{said}: {self.fault}"
        fat = next((r for r, peak in enumerate(self.peaks) if peak > self.bound(r)), None)
        rank = fat if fat is not None else 0
        kept = f" keeps {self.peaks[rank]} activations, {self.bound(rank)} would do;" if fat is not None else ""
        return f"{said}, rank {rank}:{kept} {' '.join(self.lists[rank])}; the step takes {self.slower:.3g} times 1F1B's"


@exercise("10.1", title="generate 1F1B", minutes=12, needs="one_f_one_b", hints=HINTS, mistakes=MISTAKES)
def generate_one_f_one_b(answer: Callable, draw: random.Random) -> Verdict:
    """Rows over the example and some twenty pipelines, with more micro-batches than ranks and with fewer."""
    deep = [(p, p + draw.randint(0, 6)) for p in (1, 2, 3, 4, 5)] + [(draw.randint(2, 6), draw.randint(6, 12))]
    shallow = [(p, draw.randint(1, p - 1)) for p in (2, 3, 4, 6)]
    cases = []
    for p, m in [(3, 4), *deep, *shallow]:
        case = _asked(answer, p, m, draw)
        if isinstance(case, Row):
            return Verdict((case,), "no_result" if case.seen.endswith("gave None") else "")
        cases.append(case)
    example, runs = cases[0], [c for c in cases if not c.fault]
    wanted = "F0 F1 B0 F2 B1 F3 B2 B3 reduce0"
    rows = [
        Row("the example of the text, rank 1 of 3", " ".join(example.lists[1]) == wanted, wanted,
            " ".join(example.lists[1])),
        _row("each rank does all of its work, once, and reduces last", "F, B of each micro-batch, then reduce0", cases,
             lambda c: not c.fault),
    ]  # fmt: skip
    if runs:
        rows.append(_row("no more activations than needed", "at most min(p − rank, m)", runs, Case.slim))
        rows.append(_row("nobody waits longer than needed", "(m+p−1)·(F+B) with equal stages", runs,
                         lambda c: not c.late()))  # fmt: skip
    return Verdict(tuple(rows), "" if all(row.ok for row in rows) else _mistake(cases))


def _asked(answer: Callable, p: int, m: int, draw: random.Random) -> Case | Row:
    """What the answer gave for every rank of one pipeline, or the row that says why it is no answer."""
    lists = []
    for rank in range(p):
        shown = f"one_f_one_b({p}, {m}, {rank})"
        words = call(answer, p, m, rank, shown=shown)
        if hasattr(words, "__next__"):
            words = call(list, words, shown=shown)
        if not is_words(words):
            return Row("returns a list of words", False, '["F0", …, "reduce0"]', f"{shown} gave {str(words)[:80]}")
        lists.append(list(words))
    try:
        schedule = schedule_of(lists, micro_batches=m, reduces=True)
        peaks = check(schedule).peak_activations
    except ScheduleError as error:
        return Case(p, m, lists, fault=str(error))
    forward, backward = draw.choice([(1.0, 2.0), (1.0, 1.0), (2.0, 3.0)])
    took = predict(schedule, Costs(forward, B=backward)).step_s
    return Case(p, m, lists, schedule, peaks, took / ((m + p - 1) * (forward + backward)))


def _mistake(cases: list[Case]) -> str:
    """The mistake that explains what is seen, the plainest first."""
    deep, shallow = [c for c in cases if c.m >= c.p], [c for c in cases if c.m < c.p]
    if any(c.fault for c in shallow) and not any(c.fault or not c.slim() or c.late() for c in deep):
        return "ignores_m"
    lacking = {f"{op}{i}" for c in deep for words in c.lists for op in "FB" for i in range(c.m)
               if f"{op}{i}" not in words}  # fmt: skip
    if lacking:
        return "no_cooldown" if all(word[0] == "B" for word in lacking) else ""
    last = {"reduce0" in c.lists[-1] for c in deep}
    others = {"reduce0" in words for c in deep for words in c.lists[:-1]}
    if False in last | others:
        return {(False, True): "reduce_in_the_cooldown", (False, False): "no_reduce"}.get((*last, *others), "")
    if any(words[-1] != "reduce0" for c in deep for words in c.lists):
        return "reduces_early"
    several = [c for c in deep if c.p > 2 and c.m > c.p] or [c for c in deep if c.p > 1]
    off = [[have - (c.p - r) for r, have in enumerate(c.warm())] for c in several]
    if all(have == c.m for c in several for have in c.warm()):
        return "gpipe"
    if all(have == 1 for c in several for have in c.warm()):
        return "no_warmup"
    if all(len(set(c.warm())) == 1 for c in several):
        return "same_on_every_rank"
    if all(far == 1 for each in off for far in each):
        return "one_too_many"
    if all(far == -1 for each in off for far in each[:-1]):
        return "one_too_few"
    return ""


def _row(name: str, expected: str, cases: list[Case], holds: Callable[[Case], Any]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: (c.p, c.m))
    seen = str(broken[0]) if broken else f"held in {len(cases)} pipelines"
    return Row(name, not broken, expected, seen)
