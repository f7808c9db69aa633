"""Which step an event belongs to: the one during which the host launched it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from course_lib.trace.classify import step_number
from course_lib.trace.events import Event, Events
from course_lib.trace.note import Note

OUTSIDE = 2**31 - 1
"""The step of what was launched outside every recorded step. No step span has this number, so no step counts it."""


@dataclass(frozen=True)
class Step:
    """The host's window of one step, in nanoseconds."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True)
class Steps:
    """The steps of one file in order of time."""

    windows: tuple[Step, ...]
    _begins: list[int] = field(init=False, repr=False, compare=False)
    _reach: list[int] = field(init=False, repr=False, compare=False)
    """The latest end of the steps up to each."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_begins", [w.start for w in self.windows])
        object.__setattr__(self, "_reach", list(accumulate((w.stop for w in self.windows), max)))

    def at(self, time: int) -> int:
        """The step during which `time` lies, the one that began last if there are several; `OUTSIDE` if in none, -1 if
        the file has no steps."""
        if not self.windows:
            return -1
        k = bisect_right(self._begins, time) - 1
        while k >= 0 and time < self._reach[k]:
            if time < self.windows[k].stop:
                return self.windows[k].number
            k -= 1
        return OUTSIDE


def find_steps(events: Events, truncated: bool) -> tuple[Steps, list[Note]]:
    """Steps from the spans of `ProfilerStep#…` or `course::step …`; their numbers may be off by one, their times not.

    Of a cut file the step in which it was cut is dropped.
    """
    marks = [(step_number(e.name), e) for e in (*events.annotations, *events.operators)]
    found = sorted(((n, e) for n, e in marks if n is not None and e.stop > e.start), key=lambda m: m[1].start)
    notes: list[Note] = []
    seen: dict[int, list[Event]] = {}
    for number, event in found:
        # Several threads may carry the same step; that is one step, not two. They come in order of their start.
        mine = seen.setdefault(number, [])
        if not mine or event.start >= mine[-1].stop:
            mine.append(event)
        elif event.stop - event.start > mine[-1].stop - mine[-1].start:
            mine[-1] = event
    windows = [Step(number, e.start, e.stop) for number, mine in seen.items() for e in mine]
    if len(seen) < len(windows):
        notes.append(Note("step-numbers", "step numbers repeat: the steps are numbered in order of time instead"))
        windows = [Step(i, w.start, w.stop) for i, w in enumerate(sorted(windows, key=lambda w: w.start))]
    windows.sort(key=lambda w: w.start)
    if any(a.stop > b.start + 1000 for a, b in pairwise(windows)):
        notes.append(Note("steps-cross", "step spans overlap in time: an event counts in the step that began last"))
    if truncated and windows and events.last is not None:
        cut = _cut(windows, events.last)
        others = "" if events.ordered else "; the file is not in order of time, so other steps may lack events too"
        notes.append(Note("dropped-step", f"step {cut.number} is dropped: the file was cut in it{others}"))
        windows.remove(cut)
    return Steps(tuple(windows)), notes


def _cut(windows: list[Step], last: int) -> Step:
    begun = [w for w in windows if w.start <= last]
    return begun[-1] if begun else windows[0]


def spread(numbers: Iterable[int]) -> str:
    """Step numbers in words: `4, 5, 6`."""
    return ", ".join("outside" if n == OUTSIDE else str(n) for n in sorted(set(numbers)))
