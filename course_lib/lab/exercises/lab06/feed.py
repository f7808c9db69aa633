"""Exercise 6.3: feed the device.

The learner writes `feed(batches, bus, compute)`:

- `batches` is an iterable of batches in pageable memory. `bus.pin(batch)` gives the batch in page-locked memory.
- `bus.copy(batch)` starts a copy to the device. From page-locked memory it returns at once; from pageable memory it
  returns when the copy has ended, as CUDA's does whatever `non_blocking` says. What it returns has `.data`, the
  batch's memory on the device, and `.wait()`, which blocks until the copy has ended and `.data` may be read.
- `compute(data)` runs one step and returns its result. The device holds two batches at most.
- The result is the list of all results in order. While batch i is computed, batch i+1 is on its way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from course_lib.lab.exercises.lab06.slow_bus import Event, SlowBus
from course_lib.lab.guard import call
from course_lib.lab.model import Row, Verdict, exercise

HINTS = (
    "It is exercise 6.1 on another wire: one batch is computed while the next one travels. So in each turn of your "
    "loop two batches are at hand, the new one and the one before.",
    "Start the copy of the new batch. Then wait for the one *before* and compute it. Then the new one becomes the one "
    "before. When the loop is over, one batch is left.",
    "results, before = [], None; for batch in batches: coming = bus.copy(bus.pin(batch)); if before is not None: "
    "before.wait(); results.append(compute(before.data)); then before = coming. After the loop the same once more for "
    "`before`, if it is not None.",
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end?",
    "pageable": "You copy from pageable memory. The operating system may move that memory at any time, so the device "
    "cannot fetch from it by itself: the call blocks until the copy has ended, and nothing overlaps, although the "
    "program looks asynchronous. Copy what `bus.pin(batch)` gives.",
    "reads_too_early": "You compute on a batch whose copy has not ended. The memory is there, its contents are those "
    "of some earlier batch, in part or whole: no error, wrong numbers. Call `.wait()` of that batch first.",
    "waits_at_once": "You start each copy when the batch before has been computed. The device stands still while the "
    "batch travels. Start the copy of the next batch before you compute the present one.",
    "waits_for_the_next": "You wait for the batch that you have just sent before you compute the one before it. Wait "
    "for the one that is computed next; the new one has time until its own turn.",
    "drops_the_last": "The last batch is missing. When the loop ends, one batch is on the device that nobody has "
    "computed.",
    "all_at_once": "You send batches before there is room: the device holds two, the one that is computed and the "
    "next. An epoch does not fit.",
}


class Case(NamedTuple):
    """One epoch: its batches, the results, and what happened in order."""

    batches: list[list[float]]
    results: list[float]
    events: list[Event]

    @property
    def n(self) -> int:
        return len(self.batches)

    def at(self, what: str, number: int) -> int | None:
        """When it first happened, as a place in the order of events."""
        return next((k for k, e in enumerate(self.events) if (e.what, e.number) == (what, number)), None)

    def before(self, what: str, i: int, other: str, j: int) -> bool:
        """Whether the one happened before the other; also where the other never did."""
        one, two = self.at(what, i), self.at(other, j)
        return two is None or (one is not None and one < two)

    def pinned(self) -> bool:
        return all(e.pinned for e in self.events)

    def waited(self) -> bool:
        return all(self.before("wait", i, "compute", i) for i in range(self.n))

    def ahead(self) -> bool:
        return all(self.before("copy", i + 1, "compute", i) for i in range(self.n - 1))

    def free(self) -> bool:
        """Nobody waits for batch i+1 before batch i is computed."""
        return all(self.at("wait", i + 1) is None or self.before("compute", i, "wait", i + 1)
                   for i in range(self.n - 1))  # fmt: skip

    def held(self) -> int:
        """The most batches that were on the device at once."""
        most = now = 0
        for event in self.events:
            now += (event.what == "copy") - (event.what == "compute")
            most = max(most, now)
        return most

    def right(self) -> bool:
        return self.results == [sum(batch) for batch in self.batches]

    def __str__(self) -> str:
        kinds = [f"{e.what} {e.number}" + ("" if e.pinned else " from pageable memory") for e in self.events]
        results = ", ".join(f"{value:g}" for value in self.results)
        return f"{self.n} batches: {', '.join(kinds) or 'nothing'}; results [{results}]"


@exercise("6.3", title="feed the device", minutes=6, needs="feed", hints=HINTS, mistakes=MISTAKES)
def feed_the_device(answer: Callable, draw: random.Random) -> Verdict:
    """Rows over epochs of no batch, one batch and several, given as a list or as they come."""
    cases = []
    for n in (0, 1, 2, 3, *(draw.randint(4, 9) for _ in range(6))):
        batches = [[float(draw.randint(1, 99)) for _ in range(draw.randint(1, 4))] for _ in range(n)]
        bus, shown = SlowBus(), f"feed({n} batches, bus, compute)"
        given = _as_they_come(batches) if n % 2 else [list(batch) for batch in batches]
        results = call(answer, given, bus, bus.compute, shown=shown)
        try:
            cases.append(Case(batches, [float(value) for value in results], bus.events))
        except (TypeError, ValueError):
            row = Row("returns the results", False, "a list of numbers", f"{shown} gave {results!r}")
            return Verdict((row,), "no_result" if results is None else "")
    rows = (
        _row("copies begin in page-locked memory", "bus.copy(bus.pin(batch))", cases, Case.pinned),
        _row("a batch is computed after its copy has ended", "its wait() before its compute", cases, Case.waited),
        _row("the next batch is on its way meanwhile", "copy of i+1 begun before compute of i", cases, Case.ahead),
        _row("compute waits for its own batch only", "no wait for i+1 before compute of i", cases, Case.free),
        _row("two batches on the device at most", "2", cases, lambda c: c.held() <= 2),
        _row("every batch is computed, once and in order", "a result for each", cases,
             lambda c: len(c.results) == c.n and (c.right() or not c.waited())),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(cases))


def _mistake(cases: list[Case]) -> str:
    """The mistake that explains what is seen; the plainest one first."""
    if not all(c.pinned() for c in cases):
        return "pageable"
    if any(c.held() > 2 for c in cases):
        return "all_at_once"
    if not all(c.waited() for c in cases):
        return "reads_too_early"
    if not all(c.ahead() for c in cases):
        return "waits_at_once"
    if not all(c.free() for c in cases):
        return "waits_for_the_next"
    return "drops_the_last" if any(len(c.results) < c.n for c in cases) else ""


def _row(name: str, expected: str, cases: list[Case], holds: Callable[[Case], bool]) -> Row:
    """One rule over all its cases. The shortest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: c.n)
    seen = str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} epochs"
    return Row(name, not broken, expected, seen)


def _as_they_come(batches: Sequence[Sequence[float]]) -> Iterator[list[float]]:
    for batch in batches:
        yield list(batch)
