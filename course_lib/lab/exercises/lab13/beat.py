"""Exercise 13.2: beat the given schedule.

The learner writes `beat(lists, seconds)`: other lists for the same ranks, with which an update takes less time in a
long run, where one pass follows the other. `seconds(lists)` predicts it, and is infinite for lists that cannot run.

Any way will do: moves that are thought out, or tried. What comes back is judged by what it does: it can run, all work
is there, and it gains most of what carrying steps and gathers into the next pass gains.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from course_lib.lab.guard import Broke, call
from course_lib.lab.model import Row, Verdict, exercise
from course_lib.lab.workbench.pipeline_words import is_words, with_words
from course_lib.schedule.action import Schedule, ScheduleError
from course_lib.schedule.check import check
from course_lib.schedule.generators import zero_bubble
from course_lib.schedule.joint import naive, reductions_at_last_use, under_the_next_pass
from course_lib.simulate.bound import bound
from course_lib.simulate.pipeline import Costs, period

MOST_CALLS, SHARE = 400, 0.75

HINTS = (
    "Passes follow each other, so a rank's list is a circle. Which of its stages does the next pass need first, and "
    "which later? A step at the *front* of the list, before the first F of its stage, belongs to the gradient of the "
    "pass before. What could travel under the first forwards then?",
    "For each rank and each of its stages except the one whose F comes first: take its step and its gather away from "
    "the end, and put them into the front part of the list, some computations before the first F of that stage, so "
    "that the gather has time to arrive. How many computations before? Try 0, 1, 2, 3 and let `seconds` choose.",
    'order = list(dict.fromkeys(w.split("@")[1] for w in words if w[0] == "F")); for stage in order[1:]: taken = [w '
    'for w in words if w.startswith(("step", "gather")) and w.endswith("@" + stage)]; words = [w for w in words if w '
    'not in taken]; first = next(k for k, w in enumerate(words) if w[0] == "F" and w.endswith("@" + stage)); at = '
    "max(0, first - ahead); words[at:at] = taken. Do this to all ranks for ahead in range(4); return the lists with "
    "the smallest `seconds`. Then go on: W that nobody waits for can be held back, to reduce the stage that is needed "
    "first under them.",
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end?",
    "changes_the_input": "The lists that were passed have changed. What you compare with is then no longer what was "
    "given: make a new list with list(words) before you insert or remove.",
    "drops_work": "Some work is missing, or there twice. A schedule gets faster by leaving work out, but then it is "
    "another update: each word of a rank stays on that rank, once.",
    "cannot_run": "Your lists cannot run: `seconds` is infinite for them. Something comes before what it needs. A W "
    "comes behind its I, a reduction behind the last W of its stage, a step behind its reductions, a gather behind the "
    "step.",
    "frees_too_late": "All is in its place but a `free`: it drops what the gather has brought, before an F that needs "
    "it. A stage is freed between its last W and the *gather* of its turn. Leave `free` where it stands, or take it "
    "along, in front of that gather.",
    "forgets_the_best": "You have seen better lists than those you return: keep the best so far, and return that. If "
    "you do keep it, keep a *copy*, which later moves do not change.",
    "no_faster": "The update takes as long as before. Moving what is hidden already gains nothing: look for what the "
    "ranks wait for at the end of a pass, and what they could do meanwhile.",
    "gathers_too_late": "Your gathers are in the next pass, but right in front of the F that waits for them. A gather "
    "is only started where it stands, and then needs time: put other computations between it and that F.",
    "too_little": "Faster, but not by enough. The steps and gathers of all stages but the one that is needed first can "
    "go under the forwards of the next pass, and on every rank: what one rank saves alone, it may only wait for the "
    "others.",
    "too_many_calls": f"`seconds` was asked more than {MOST_CALLS} times. Think about which moves can help before "
    "trying, or stop earlier.",
}  # fmt: skip


@dataclass
class Oracle:
    """`seconds(lists)`, which remembers what it was asked."""

    schedule: Schedule
    costs: Costs
    calls: int = 0
    least: float = math.inf
    known: dict[tuple, float] = field(default_factory=dict)

    def seconds(self, lists: Any) -> float:
        if not isinstance(lists, list | tuple) or not all(map(is_words, lists)):
            raise ValueError(f"seconds({str(lists)[:60]}): give a list of words for each rank")
        self.calls += 1
        if self.calls > MOST_CALLS:
            raise RuntimeError(f"seconds was asked more than {MOST_CALLS} times")
        took = self.of(lists)
        self.least = min(self.least, took)
        return took

    def of(self, lists: Sequence[Sequence[str]]) -> float:
        key = tuple(tuple(words) for words in lists)
        if key not in self.known:
            try:
                self.known[key] = math.inf if self.missing(lists) else period(with_words(self.schedule, lists),
                                                                              self.costs)
            except ScheduleError:
                self.known[key] = math.inf
        return self.known[key]

    def missing(self, lists: Sequence[Sequence[str]]) -> str:
        """A word that a rank lacks or has too often, or ""."""
        if len(lists) != len(self.schedule.ranks):
            return f"{len(lists)} lists for {len(self.schedule.ranks)} ranks"
        for rank, (words, actions) in enumerate(zip(lists, self.schedule.ranks)):
            have, want = Counter(words), Counter(map(str, actions))
            if have != want:
                lacks, extra = want - have, have - want
                return f"rank {rank} {'lacks ' + next(iter(lacks)) if lacks else 'has an extra ' + next(iter(extra))}"
        return ""

    def fault(self, lists: Sequence[Sequence[str]]) -> str:
        """Why the lists cannot run, or ""."""
        try:
            check(with_words(self.schedule, lists))
        except ScheduleError as error:
            return str(error)
        return ""


def given_lists(schedule: Schedule) -> list[list[str]]:
    """The words of each rank, each naming its stage."""
    return [[str(action) for action in actions] for actions in schedule.ranks]


class Case(NamedTuple):
    """One schedule, what came back, and what it is worth, in seconds."""

    kind: str
    given: list[list[str]]
    found: list[list[str]]
    touched: bool
    missing: str
    fault: str
    frees: bool
    before: float
    took: float
    target: float
    least: float
    bound: float

    def in_front(self) -> list[bool]:
        """For each gather before the first F of its stage: whether that F is the next computation of its rank."""
        out = []
        for words in self.found:
            first: dict[str, int] = {}
            for k, w in enumerate(words):
                if w[0] == "F":
                    first.setdefault(w.partition("@")[2], k)
            out += [not any(x[0] in "FIW" for x in words[k:first[w.partition("@")[2]]])
                    for k, w in enumerate(words) if w.startswith("gather") and k < first[w.partition("@")[2]]]
        return out

    def __str__(self) -> str:
        if self.missing or self.fault:
            return f"{self.kind}: {self.missing or self.fault}"
        seen = f"; {self.least * 1e3:.0f} ms was seen" if self.least < self.took * (1 - 1e-9) else ""
        return (f"{self.kind}: an update took {self.before * 1e3:.0f} ms and takes {self.took * 1e3:.0f}{seen}; "
                f"no more than {self.target * 1e3:.0f} is asked for, nothing beats {self.bound * 1e3:.0f}")


@exercise("13.2", title="beat the given schedule", minutes=20, needs="beat", hints=HINTS, mistakes=MISTAKES)
def beat_the_given_schedule(answer: Callable, draw: random.Random) -> Verdict:
    """Rows over schedules of two and three stages a rank, with drawn costs."""
    cases = []
    for p, m, v in ((2, 3, 2), (2, draw.randint(2, 3), 3), (3, 3, 2)):
        case = _asked(answer, p, m, v, draw)
        if isinstance(case, Row):
            ends = {"gave None": "no_result", f"more than {MOST_CALLS} times": "too_many_calls"}
            return Verdict((case,), next((key for end, key in ends.items() if end in case.seen), ""))
        cases.append(case)
    rows = [_row("the lists that were passed", "unchanged", cases, lambda c: not c.touched),
            _row("all work is there, once, on its rank", "the same words", cases, lambda c: not c.missing),
            _row("they can run", "proved by `check`", cases, lambda c: c.missing or not c.fault)]  # fmt: skip
    if runs := [c for c in cases if not c.missing and not c.fault]:
        rows += [_row("the best that was seen is returned", "the smallest `seconds` of all that were asked", runs,
                      lambda c: c.took <= c.least * (1 + 1e-9)),
                 _row("an update is faster", f"{SHARE:.0%} of what the next pass can hide", runs,
                      lambda c: c.took <= c.target)]  # fmt: skip
    return Verdict(tuple(rows), "" if all(row.ok for row in rows) else _mistake(cases))


def _asked(answer: Callable, p: int, m: int, v: int, draw: random.Random) -> Case | Row:
    each = draw.uniform(0.016, 0.024)
    costs = Costs(F=each, I=each * draw.uniform(0.9, 1.1), W=each * draw.uniform(0.9, 1.1),
                  reduce=each * draw.uniform(0.3, 0.7), gather=each * draw.uniform(0.8, 1.4), step=each / 20)
    schedule = reductions_at_last_use(naive(zero_bubble(p, m, v), 2))
    oracle, kind = Oracle(schedule, costs), f"p = {p}, m = {m}, {v} stages a rank"
    passed, given = given_lists(schedule), given_lists(schedule)
    shown = f"beat(lists, seconds) for {kind}"
    try:
        got = call(answer, passed, lambda lists: oracle.seconds(lists), shown=shown)  # a plain function travels
    except Broke:
        if oracle.calls <= MOST_CALLS:
            raise
        return Row("asks no more than needed", False, f"at most {MOST_CALLS} times",
                   f"{shown} asked `seconds` more than {MOST_CALLS} times")  # fmt: skip
    if not isinstance(got, list | tuple) or not all(map(is_words, got)):
        return Row("returns a list of words for each rank", False, f"{p} lists of words",
                   f"{shown} gave {str(got)[:80]}")  # fmt: skip
    found = [list(words) for words in got]
    missing = oracle.missing(found)
    fault = "" if missing else oracle.fault(found)
    frees = bool(fault) and not oracle.fault([freed_at_once(words) for words in found])
    before = oracle.of(given)
    goal = min(period(under_the_next_pass(schedule, ahead), costs) for ahead in (0, 1, 2))
    return Case(kind, given, found, passed != given, missing, fault, frees, before, oracle.of(found),
                before - SHARE * (before - goal), oracle.least, bound(schedule, costs).seconds)


def freed_at_once(words: Sequence[str]) -> list[str]:
    """Each `free` right behind the last computation of its stage."""
    out = [w for w in words if not w.startswith("free")]
    for free in (w for w in words if w.startswith("free")):
        stage = free.partition("@")[2]
        last = max((k for k, w in enumerate(out) if w[0] in "FIW" and w.partition("@")[2] == stage), default=-1)
        out.insert(last + 1, free)
    return out


def _mistake(cases: Sequence[Case]) -> str:
    """The mistake that explains what is seen, the plainest first."""
    if any(c.touched for c in cases):
        return "changes_the_input"
    if any(c.missing for c in cases):
        return "drops_work"
    if faults := [c for c in cases if c.fault]:
        return "frees_too_late" if all(c.frees for c in faults) else "cannot_run"
    if any(c.took > c.least * (1 + 1e-9) for c in cases):
        return "forgets_the_best"
    if all(c.in_front() and all(c.in_front()) for c in cases):
        return "gathers_too_late"
    return "no_faster" if all(c.took >= c.before * (1 - 1e-6) for c in cases) else "too_little"


def _row(name: str, expected: str, cases: Sequence[Case], holds: Callable[[Case], Any]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = [c for c in cases if not holds(c)]
    return Row(name, not broken, expected, str(broken[0]) if broken else f"held in {len(cases)} schedules")
