"""The three given traces of exercise 5.4: real runs of the course, profiled, and kept as small JSON files.

`traces/A`, `B` and `C` hold one file a rank. `make_traces` made them, and says how.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from course_lib import trace
from course_lib.timeline import Timeline

FOLDER = Path(__file__).with_name("traces")
NAMES = ("A", "B", "C")
STEP = 1
"""The step that the exercise looks at."""


@lru_cache
def given_traces() -> dict[str, Timeline]:
    """The given traces by name, all ranks and steps."""
    return {name: trace.read(FOLDER / name) for name in NAMES}


def given_steps() -> dict[str, list[tuple[int, str, int, int]]]:
    """One step of each given trace, in the form that exercise 5.4 hands to the learner's function."""
    return {name: spans_of(timeline, STEP) for name, timeline in given_traces().items()}


def spans_of(timeline: Timeline, step: int) -> list[tuple[int, str, int, int]]:
    """(rank, kind, start, stop) of a step's forward, backward and communication, in ns after the step began on the
    first rank. Work belongs to the step during which it starts."""
    windows = {s.rank: (s.start, s.stop) for s in timeline if s.kind == "step" and s.step == step}
    origin = min(start for start, _ in windows.values())
    found = []
    for s in timeline:
        kind = "comm" if s.kind == "comm" else s.name.split()[0] if s.kind == "compute" else ""
        begin, end = windows.get(s.rank, (0, 0))
        # The emulated device may date work back to just before its step.
        if kind in ("forward", "backward", "comm") and begin - 3_000_000 <= s.start < end:
            found.append((s.rank, kind, max(s.start, begin) - origin, s.stop - origin))
    return found
