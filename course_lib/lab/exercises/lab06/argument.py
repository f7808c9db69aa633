"""Exercise 6.2: sending once against sending every micro-step, as a formula.

The learner writes `step_time(N, Tf_s, Tb_s, ready_s, cost_s, every)`:

- one update has `N` micro-steps of `Tf_s` forward and `Tb_s` backward, one directly after the other: compute never
  waits for the wire;
- bucket j of a micro-step is ready `ready_s[j]` after *its backward* began, and keeps the wire busy for `cost_s[j]`;
- the wire carries one bucket at a time, in order; with `every` each micro-step sends its buckets, else the last only;
- the result is the seconds until both compute and the wire have ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from course_lib.lab.guard import call
from course_lib.lab.model import Row, Verdict, exercise

HINTS = (
    "Compute is easy: backward k begins at k·(Tf + Tb) + Tf, whatever the wire does. Carry one number along for the "
    "wire: when is it free?",
    "A bucket starts when it is ready *and* the wire is free. Go through the micro-steps that send, and in each "
    "through the buckets, and move the time at which the wire is free. Never set it back: the queue of one micro-step "
    "is still there when the next begins. The update ends when both have ended.",
    "free = 0.0; for k in range(N): if every or k == N - 1: begin = k * (Tf_s + Tb_s) + Tf_s; for ready, cost in "
    "zip(ready_s, cost_s): free = max(free, begin + ready) + cost. Return max(N * (Tf_s + Tb_s), free).",
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end?",
    "forgets_the_queue": "Your wire is free again at the start of each micro-step. What the micro-step before has left "
    "in the queue is still there, and the new buckets wait behind it. That queue is the whole difference between the "
    "two ways.",
    "the_larger": "You take the larger of compute and communication. That is the physical limit, and nobody reaches "
    "it: the last bucket is ready when backward ends, and still has to travel.",
    "nothing_hides": "You add communication to compute. A bucket that is ready before backward ends travels while the "
    "rest is computed.",
    "waits_every_time": "Your compute waits for the wire at the end of every micro-step. That is stock DDP without "
    "no_sync. Here the next micro-step begins at once, and only the end of the update waits.",
    "after_backward": "Your buckets start when backward ends. Bucket j is ready `ready_s[j]` after backward began, and "
    "can leave then.",
    "forgets_compute": "Your update ends with the wire. Where the last bucket has arrived before backward ends, it is "
    "compute that ends the update: return the later of the two.",
    "flag_ignored": "`every` changes nothing in your result: all micro-steps send in both cases. Without it, only the "
    "last one does.",
}


class Case(NamedTuple):
    """One update: its arguments, and what came back."""

    N: int
    Tf: float
    Tb: float
    ready: list[float]
    cost: list[float]
    every: bool
    got: float

    def takes(self, seconds: float) -> bool:
        return abs(self.got - seconds) <= 1e-6 * seconds

    def compute(self) -> float:
        return self.N * (self.Tf + self.Tb)

    def traffic(self) -> float:
        return sum(self.cost) * (self.N if self.every else 1)

    def lone(self, ready: Sequence[float] | None = None) -> float:
        """When the last bucket has arrived, from the start of a backward that finds the wire free: the latest over j
        of "bucket j is ready, and everything from j on follows without a gap"."""
        ready = self.ready if ready is None else ready
        return max(r + sum(self.cost[j:]) for j, r in enumerate(ready))

    def time(self, ready: Sequence[float] | None = None, every: bool | None = None) -> float:
        """When the wire has ended; or compute, if that is longer."""
        return max(self.compute(), self.arrival(ready, every))

    def arrival(self, ready: Sequence[float] | None = None, every: bool | None = None) -> float:
        """The latest over all micro-steps that send of "its first, second, … bucket is ready, and everything from
        there on follows without a gap"."""
        each = self.every if every is None else every
        micro, whole = self.Tf + self.Tb, sum(self.cost)
        sending = range(self.N) if each else [self.N - 1]
        return max(k * micro + self.Tf + self.lone(ready) + (self.N - 1 - k) * whole for k in sending)

    def right(self) -> bool:
        return self.takes(self.time())

    def __str__(self) -> str:
        return f"{_shown(self[:-1])} gave {self.got:.6g}"


@exercise("6.2", title="the argument as a formula", minutes=8, needs="step_time", hints=HINTS, mistakes=MISTAKES)
def predict_both(answer: Callable, draw: random.Random) -> Verdict:
    """Rows over the example of the text and some fifty updates drawn by chance, each sent once and every micro-step."""
    drawn = [_drawn(draw, fast) for fast in (True, False) for _ in range(20)] + [_early(draw) for _ in range(12)]
    given = [(*case, every) for case in ((2, 1.0, 2.0, [1.0, 2.0], [2.0, 2.0]), *drawn) for every in (False, True)]
    cases = []
    for arguments in given:
        shown = _shown(arguments)
        got = call(answer, *arguments[:3], list(arguments[3]), list(arguments[4]), arguments[5], shown=shown)
        try:
            cases.append(Case(*arguments, float(got)))
        except (TypeError, ValueError):
            row = Row("returns seconds", False, "a number", f"{shown} gave {got!r}")
            return Verdict((row,), "no_result" if got is None else "")
    once, every = [c for c in cases if not c.every], [c for c in cases if c.every]
    ties = [c for c in every if c.lone() <= c.Tb + c.Tf + c.ready[0]]
    queues = [c for c in every if c not in ties]
    rows = (
        Row("the example of the text", cases[0].right() and cases[1].right(), "9 and 10", f"{cases[0]}; {cases[1]}"),
        _row("sending once", "compute, and the last micro-step's tail", once, Case.right),
        _row("every micro-step, on a wire that keeps up", "the same as sending once", ties, Case.right),
        _row("every micro-step, on a wire that does not", "longer by what is left in the queue", queues, Case.right),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(cases, once, every))


def _mistake(cases: list[Case], once: list[Case], every: list[Case]) -> str:
    """The mistake that explains what all cases show; the plainest one first."""
    if all(c.takes(max(c.compute(), c.traffic())) for c in cases):
        return "the_larger"
    if all(c.takes(c.compute() + c.traffic()) for c in cases):
        return "nothing_hides"
    if all(c.takes(c.time(every=True)) for c in cases):
        return "flag_ignored"
    late = [[c.Tb] * len(c.cost) for c in cases]
    if all(c.takes(c.time(ready=ready)) for c, ready in zip(cases, late)):
        return "after_backward"
    if all(c.takes(c.arrival()) for c in cases):
        return "forgets_compute"
    if not all(c.right() for c in once):
        return ""
    if all(c.takes(c.N * (c.Tf + max(c.Tb, c.lone()))) for c in every):
        return "waits_every_time"
    return "forgets_the_queue" if all(c.takes(c.time(every=False)) for c in every) else ""


def _row(name: str, expected: str, cases: list[Case], holds: Callable[[Case], bool]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: (len(c.cost), c.N))
    seen = str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} updates"
    return Row(name, not broken, expected, seen)


def _drawn(draw: random.Random, fast: bool) -> tuple:
    """A wire that needs a part of a micro-step's compute, or one that needs more than all of it. The last bucket is
    ready when backward ends, and costs so much that no two mistakes give the same time."""
    count, Tf, Tb = draw.randint(2, 4), draw.randint(5, 15) / 1000, draw.randint(16, 40) / 1000
    ready = [*sorted(Tb * draw.uniform(0.1, 0.8) for _ in range(count - 1)), Tb]
    r = draw.uniform(0.3, 0.6) if fast else draw.uniform(1.3, 2.5)
    parts = [draw.uniform(0.5, 1.5) for _ in range(count)]
    cost = [r * (Tf + Tb) * part / sum(parts) for part in parts]
    return draw.randint(2, 6), Tf, Tb, [round(t, 4) for t in ready], [round(c, 4) for c in cost]


def _early(draw: random.Random) -> tuple:
    """The last bucket is ready well before backward ends, and the wire is fast, or not much too slow: some buckets
    wait for their turn and before others the wire pauses."""
    N, Tf, Tb, ready, cost = _drawn(draw, fast=True)
    earlier, slower = draw.uniform(0.4, 0.8), draw.uniform(0.2, 3)
    return N, Tf, Tb, [round(t * earlier, 4) for t in ready], [round(c * slower, 4) for c in cost]


def _shown(given: Sequence) -> str:
    N, Tf, Tb, ready, cost, every = given
    return f"step_time({N}, {Tf:g}, {Tb:g}, ready_s={ready}, cost_s={cost}, every={every})"
