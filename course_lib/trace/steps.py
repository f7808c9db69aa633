"""Which step an event belongs to: the one during which the host launched it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

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

    def at(self, time: int) -> int:
        """The step during which `time` lies; `OUTSIDE` if in none, -1 if the file has no steps."""
        if not self.windows:
            return -1
        k = bisect_right(self.windows, time, key=lambda s: s.start)
        return self.windows[k - 1].number if k and time < self.windows[k - 1].stop else OUTSIDE


def find_steps(events: Events, truncated: bool) -> tuple[Steps, list[Note]]:
    """Steps from the spans of `ProfilerStep#…` or `course::step …`; their numbers may be off by one, their times not.

    Of a cut file the step in which it was cut is dropped.
    """
    marks = [(step_number(e.name), e) for e in (*events.annotations, *events.operators)]
    found = sorted(((n, e) for n, e in marks if n is not None and e.stop > e.start), key=lambda m: m[1].start)
    notes: list[Note] = []
    seen: dict[tuple[int, int], Event] = {}
    for number, event in found:
        # Several threads may carry the same step; that is one step, not two.
        same = next((k for k, e in seen.items()
                     if k[0] == number and e.start < event.stop and event.start < e.stop), None)
        if same is None:
            seen[number, event.start] = event
        elif event.stop - event.start > seen[same].stop - seen[same].start:
            seen[same] = event
    numbers = [number for number, _ in seen]
    windows = [Step(number, e.start, e.stop) for (number, _), e in seen.items()]
    if len(set(numbers)) < len(numbers):
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
