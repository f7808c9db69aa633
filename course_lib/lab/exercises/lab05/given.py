"""The three given traces of exercise 5.4: real runs of the course, profiled, and kept as small JSON files.

`traces/A`, `B` and `C` hold one file a rank. `make_traces` made them, and says how.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from course_lib import trace
from course_lib.timeline import Timeline, subtract, union

FOLDER = Path(__file__).with_name("traces")
NAMES = ("A", "B", "C")
STEP = 1
"""The step that the exercise looks at."""
EARLY_NS = 3_000_000


@lru_cache
def given_traces() -> dict[str, Timeline]:
    """The given traces by name, all ranks and steps."""
    return {name: trace.read(FOLDER / name) for name in NAMES}


def given_steps() -> dict[str, list[tuple[int, str, int, int]]]:
    """One step of each given trace, in the form that exercise 5.4 hands to the learner's function."""
    return {name: spans_of(timeline, STEP) for name, timeline in given_traces().items()}


def spans_of(timeline: Timeline, step: int) -> list[tuple[int, str, int, int]]:
    """(rank, kind, start, stop) of a step's forward, backward and communication, in ns after the step began on the
    first rank. Work belongs to the step during which it starts.

    Layers that follow each other without a pause are one span. A host that woke up late makes the profiler's spans of
    an emulated device overlap by that; here they do not.
    """
    windows = {s.rank: (s.start, s.stop) for s in timeline if s.kind == "step" and s.step == step}
    origin, found = min(start for start, _ in windows.values()), []
    for rank, (begin, end) in windows.items():
        # The emulated device may date work back to just before its step.
        mine = [s for s in timeline if s.rank == rank and begin - EARLY_NS <= s.start < end]
        forward, backward = (union(np.array([(max(s.start, begin), s.stop) for s in mine if s.kind == "compute"
                                             and s.name.startswith(kind)], np.int64).reshape(-1, 2))
                             for kind in ("forward", "backward"))
        parts = {"forward": forward.tolist(), "backward": subtract(backward, forward).tolist(),
                 "comm": [(s.start, s.stop) for s in mine if s.kind == "comm"]}  # fmt: skip
        found += [(rank, kind, start - origin, stop - origin) for kind, spans in parts.items() for start, stop in spans]
    return found
