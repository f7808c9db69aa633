"""Exercise 6.1: double buffers.

The learner writes three methods; the cell of the exercise gives the rest:

    class DoubleBuffer:
        def __init__(self, wire):
            self.wire = wire                # wire.ranks, wire.buffers[0] and [1], wire.launch(b) -> handle
            self.handles = [None, None]     # of what is in flight, by buffer
            self.total = torch.zeros_like(wire.buffers[0])

        def collect(self, b): ...           # if buffer b is in flight: wait for it, add what arrived to self.total
        def micro_step(self, i, gradient): ...   # gradient of micro-step i alone, a 1-D tensor
        def finish(self): ...               # the mean over ranks of the window's gradient; ready for the next window

`wire.launch(b)` sums `buffers[b]` over the ranks in place and returns at once. Micro-step i must leave in the call
that brings it, and may be waited for in the call of micro-step i+2 at the earliest: that one needs its buffer.

Gradients are drawn so that each micro-step of each rank has an element of its own: how often each was counted can be
read off the result.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from course_lib.lab.exercises.lab06.flying_wire import FlyingWire, FlyingWork
from course_lib.lab.guard import Broke, call
from course_lib.lab.model import Row, Verdict, exercise

HINTS = (
    "Follow one buffer. It is filled, it flies, it is waited for, its contents are added to the total, and only then "
    "is it filled again. Micro-step i uses buffer i % 2. Where in that circle does each of your methods stand?",
    "`collect(b)` does nothing unless `self.handles[b]` is there; else wait, add the buffer to the total, and set the "
    "handle back to None. `micro_step` first collects the buffer it needs, then *replaces* its contents by the "
    "gradient and launches it. `finish` collects both.",
    "collect: if self.handles[b] is not None: self.handles[b].wait(); self.total += self.wire.buffers[b]; "
    "self.handles[b] = None. micro_step: b = i % 2; self.collect(b); self.wire.buffers[b].copy_(gradient); "
    "self.handles[b] = self.wire.launch(b). finish: collect 0 and 1; mean = self.total / self.wire.ranks; "
    "self.total = torch.zeros_like(self.total); return mean.",
)

MISTAKES = {
    "accumulates_in_flight": "You add to a buffer that is in flight. The wire reads it while you write: some ranks "
    "send the old value, some the new, and nobody notices. Fill the other buffer, and this one after its wait().",
    "forgets_to_wait": "You fill a buffer again without having waited for it, so what was on its way is lost or mixed "
    "up with the new. Micro-step i+2 needs the buffer of micro-step i: collect it first.",
    "waits_too_early": "You wait for a micro-step in its own call or in the next. Then backward stands still while the "
    "wire works, and the second buffer is good for nothing. Wait when the buffer is needed again, two micro-steps "
    "later, or in finish.",
    "reads_too_early": "finish reads a buffer that is still in flight: what is in it is not the sum over ranks yet. "
    "Wait for both handles first.",
    "drops_the_last": "The last micro-steps are missing. When the window ends, up to two are still in flight, and "
    "nothing comes after them to collect them but finish.",
    "counts_twice": "A micro-step is in your result more than once. After a wait() the buffer still holds the old sum. "
    "If you add the next gradient to it, the old one travels again, and is counted again: replace it (copy_). The same "
    "happens if finish adds a buffer that was collected already.",
    "never_divides": "Your result is the sum over the ranks. The mean is wanted: divide by `self.wire.ranks`.",
    "keeps_the_handle": "After finish a handle is still in `self.handles`, though it was waited for. The next window "
    "finds it, and adds what its buffer held once more. Set it back to None when you have collected it.",
    "keeps_the_total": "The first window is right, the second is not: it begins with what the first left behind. Give "
    "the next window a new total of zeros. Setting the old one to zero in place also empties the result that you "
    "returned, if it is the same tensor.",
}


class Played(NamedTuple):
    """One window on rank 0: how often each micro-step of each rank was counted (1 is right), and what the wire saw."""

    number: int
    ranks: int
    N: int
    works: list[FlyingWork]
    added_in_flight: list[int]
    overwritten: list[int]
    counted: list[list[float]]
    kept: bool
    """Whether a handle was left in `handles` after finish."""

    def early(self) -> list[int]:
        """Micro-steps that were waited for before the call of the micro-step after the next."""
        return [w.number for w in self.works if w.waited_in is not None and w.waited_in < min(w.number + 2, self.N)]

    def unwaited(self) -> list[int]:
        return [w.number for w in self.works if w.waited_in is None]

    def right(self) -> bool:
        return all(abs(c - 1) < 1e-4 for row in self.counted for c in row)

    def __str__(self) -> str:
        said = [f"window {self.number + 1} of {self.N} micro-steps on {self.ranks} ranks"]
        for what, steps in (("added to in flight", self.added_in_flight), ("overwritten in flight", self.overwritten),
                            ("waited for early", self.early()), ("no wait", self.unwaited())):
            if steps:
                said.append(f"{what}: micro-step {', '.join(str(i) for i in steps)}")
        if not self.right():
            times = ", ".join("never arrived" if row[0] != row[0] else f"{row[0]:g}" for row in self.counted)
            said.append(f"times each micro-step counts in the mean: {times}")
        return "; ".join(said)


@exercise("6.1", title="double buffers", minutes=8, needs="DoubleBuffer", hints=HINTS, mistakes=MISTAKES,
          kind="class")  # fmt: skip
def double_the_buffer(answer: type, draw: random.Random) -> Verdict:
    """Rows over a dozen trainings of two windows each."""
    for name in ("collect", "micro_step", "finish"):
        if not callable(getattr(answer, name, None)):
            raise Broke(f"the class has no method `{name}`")
    played = [p for N in (1, 2, 3, 4, 5, *(draw.randint(3, 8) for _ in range(5)))
              for p in _windows(answer, N, draw.randint(2, 4), draw)]  # fmt: skip
    first = [p for p in played if p.number == 0]
    rows = (
        _row("every micro-step leaves in its call", "a launch for each gradient", first,
             lambda p: len(p.works) == p.N),
        _row("a buffer in flight is left alone", "changed after its wait() at the earliest", first,
             lambda p: not p.added_in_flight and not p.overwritten),
        _row("nobody waits before the buffer is needed", "micro-step i is waited for in call i+2, or in finish", first,
             lambda p: not p.early()),
        _row("everything is waited for", "a wait() for each launch", first, lambda p: not p.unwaited()),
        _row("the mean over ranks, each micro-step once", "1 for each", first, lambda p: p.right()),
        _row("the next window works like the first", "the same again",
             [p for p in played if p.number], lambda p: p.right()),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(first))


def _mistake(first: list[Played]) -> str:
    """The mistake that explains what is seen; the plainest one first, and the first window before the others."""
    if any(len(p.works) != p.N for p in first):
        return ""
    if any(p.added_in_flight for p in first):
        return "accumulates_in_flight"
    if any(p.overwritten for p in first):
        return "forgets_to_wait"
    if any(p.early() for p in first):
        return "waits_too_early"
    counts = [[row[0] for row in p.counted] for p in first]
    if any(c != c for row in counts for c in row):
        return "reads_too_early"
    if all(abs(c - p.ranks) < 1e-4 for p, row in zip(first, counts) for c in row):
        return "never_divides"
    if not any(c for row in counts for c in row):
        return "keeps_the_total"
    if any(c > 1 + 1e-4 for row in counts for c in row):
        return "counts_twice"
    if any(abs(c) < 1e-4 for row in counts for c in row[-2:]):
        return "drops_the_last"
    if all(p.right() for p in first):
        return "keeps_the_handle" if all(p.kept for p in first) else "keeps_the_total"
    return ""


def _windows(answer: type, N: int, ranks: int, draw: random.Random) -> list[Played]:
    """Two windows of rank 0, with every rank's part of them played, call by call."""
    import torch

    played: list[Played] = []
    wires: list[FlyingWire] = []
    doubles = [call(answer, FlyingWire(wires, ranks, N * ranks), shown="DoubleBuffer(wire)") for _ in range(ranks)]
    for number in range(2):
        values = torch.tensor([draw.uniform(0.5, 2) for _ in range(N * ranks)])
        for wire in wires:
            wire.begin(N)
        for i in range(N):
            for rank, (wire, double) in enumerate(zip(wires, doubles)):
                gradient = torch.zeros(N * ranks)
                gradient[i * ranks + rank] = values[i * ranks + rank]
                wire.call = i
                call(double.micro_step, i, gradient, shown=f"micro_step({i}, gradient)")
        means = []
        for wire, double in zip(wires, doubles):
            wire.call = N
            means.append(call(double.finish, shown=f"finish() after {N} micro-steps"))
        if not isinstance(means[0], torch.Tensor) or means[0].shape != values.shape:
            raise Broke(f"finish() returned {_short(means[0])}; the mean gradient is a 1-D tensor like the buffers")
        counted = (means[0].detach() * ranks / values).view(N, ranks).tolist()
        mine = wires[0]
        kept = any(handle is not None for handle in getattr(doubles[0], "handles", ()))
        played.append(Played(number, ranks, N, mine.works, mine.added_in_flight, mine.overwritten, counted, kept))
    return played


def _short(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _row(name: str, expected: str, cases: list[Played], holds: Callable[[Played], bool]) -> Row:
    """One rule over all its cases. The shortest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: c.N)
    seen = str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} windows"
    return Row(name, not broken, expected, seen)
