"""Exercise 3.3: the last short window.

The learner writes `train_epoch(batches, N, micro_step, update)`, which is called once an epoch:

- `batches` is a list of micro-batches, all of the same size. Its length need not be a multiple of N.
- `micro_step(batch, factor)` adds `factor` times the gradient of the batch's *mean* loss to what is there.
- `update()` steps the optimizer and sets the gradients to zero.
- An update follows every N micro-batches, and one more those that are left. Each is the mean over its own window.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from course_lib.lab.guard import call
from course_lib.lab.model import Row, Verdict, exercise

HINTS = (
    "How long is the window that a batch belongs to? N for all but the last, and for the last what is left. That "
    "length is needed before its first micro-step.",
    "Cut the list into windows first: batches[0:N], batches[N:2N], … The last is short by itself. Each batch of a "
    "window gets the factor 1 / len(window), and after the window comes one update.",
    "for start in range(0, len(batches), N): window = batches[start:start + N]; for batch in window: micro_step(batch, "
    "1 / len(window)); then update().",
)

MISTAKES = {
    "dropped": "The batches that do not fill a window are never used. With windows of 16 and an epoch of 20 that is a "
    "fifth of the data, which the model never sees.",
    "leaks": "The last batches are computed, but no update follows. Their gradients stay and are added to the first "
    "window of the next epoch. Update at the end of the epoch too.",
    "joins_the_last": "The batches that do not fill a window are added to the window before, which is then longer than "
    "N. They are a window of their own, and one update.",
    "divides_by_N": "The last window is short, and still divided by N, so its update is too small. Divide by the "
    "number of micro-batches in the window.",
    "never_divides": "Your factor is 1: the update is a sum over the window, N times the mean. Divide by the number of "
    "micro-batches in the window.",
    "extra_update": "An update follows an empty window. With momentum or weight decay the parameters move without "
    "data. Update only what has micro-steps.",
    "steps_each": "You update after every micro-batch. That is no accumulation: the batch of an update is N times too "
    "small.",
}


class Case(NamedTuple):
    """Two epochs: their length, and for each update the factors by batch that went into it; `left` has none yet."""

    length: int
    N: int
    updates: list[dict[int, float]]
    left: dict[int, float]

    def windows(self) -> list[list[int]]:
        epochs = [range(epoch * self.length, (epoch + 1) * self.length) for epoch in range(2)]
        return [list(epoch[i:i + self.N]) for epoch in epochs for i in range(0, self.length, self.N)]

    def grouped(self) -> bool:
        return [sorted(update) for update in self.updates] == self.windows() and not self.left

    def scaled(self, factor: Callable[[int], float]) -> bool:
        return all(abs(f - factor(len(update))) < 1e-6 for update in self.updates for f in update.values())

    @property
    def whole(self) -> bool:
        return self.length % self.N == 0

    def __str__(self) -> str:
        each = ["[" + ", ".join(f"{b}·{f:.3g}" for b, f in update.items()) + "]" for update in self.updates]
        left = f", and {sorted(self.left)} in no update" if self.left else ""
        return f"{self.length} batches, N={self.N}, two epochs: updates (batch·factor) {' '.join(each) or 'none'}{left}"


@exercise("3.3", title="the last short window", minutes=5, needs="train_epoch", hints=HINTS, mistakes=MISTAKES)
def the_last_short_window(answer: Callable, draw: random.Random) -> Verdict:
    """Rows over two epochs each, of lengths that N divides and of others."""
    whole = [_played(answer, N * draw.randint(1, 3), N) for N in (1, 2, 3, 4)]
    short = [_played(answer, N * k + draw.randint(1, N - 1), N) for N in (2, 3, 4, 8) for k in (0, 1, 2)]
    empty = _played(answer, 0, draw.randint(2, 4))
    rows = (
        _row("full windows", "an update every N batches", whole, Case.grouped),
        _row("full windows are means", "the factor 1/N", whole, lambda c: c.scaled(lambda n: 1 / c.N)),
        _row("a last short window", "its own update, before the epoch ends", short, Case.grouped),
        _row("its mean", "1 / the number of its batches", short, lambda c: c.scaled(lambda n: 1 / n)),
        Row("an epoch without batches", not empty.updates, "no update", str(empty)),
    )
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(whole, short, empty))


def _mistake(whole: list[Case], short: list[Case], empty: Case) -> str:
    """The mistake that explains what all cases show; the plainest one first."""
    cases = [*whole, *short]
    if all(len(update) == 1 for c in cases for update in c.updates) and all(
            len(c.updates) == 2 * c.length for c in cases):  # fmt: skip
        return "steps_each"
    if any(not update for c in cases for update in c.updates):
        return "extra_update"
    if not all(c.grouped() for c in whole):
        return ""
    if any(len({*c.left, *(b for update in c.updates for b in update)}) < 2 * c.length for c in short):
        return "dropped"
    if any(c.left or any(len({b // c.length for b in update}) > 1 for update in c.updates) for c in short):
        return "leaks"
    if any(not c.grouped() for c in short):
        return "joins_the_last" if any(len(update) > c.N for c in short for update in c.updates) else ""
    if all(c.scaled(lambda n: 1.0) for c in cases):
        return "never_divides"
    if all(c.scaled(lambda n, c=c: 1 / c.N) for c in cases):
        return "divides_by_N"
    return "extra_update" if empty.updates else ""


def _row(name: str, expected: str, cases: list[Case], holds: Callable[[Case], bool]) -> Row:
    """One rule over all its cases. The shortest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: (c.length, c.N))
    return Row(name, not broken, expected, str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} cases")


def _played(answer: Callable, length: int, N: int) -> Case:
    """Two epochs with one optimizer. Batches are numbers, counted through."""
    updates: list[dict[int, float]] = []
    open_window: dict[int, float] = {}

    def micro_step(batch: Any, factor: float) -> None:
        if type(batch) is not int:
            raise TypeError(f"micro_step takes one batch, not {batch!r}")
        open_window[batch] = open_window.get(batch, 0.0) + float(factor)

    def update() -> None:
        updates.append(dict(open_window))
        open_window.clear()

    for epoch in range(2):
        batches = list(range(epoch * length, (epoch + 1) * length))
        shown = f"train_epoch({batches}, {N}, micro_step, update)"
        call(answer, batches, N, micro_step, update, shown=shown)
    return Case(length, N, updates, open_window)
