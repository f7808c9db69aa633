"""The light recorder: what a rank did and when, kept in a list until somebody asks.

Wires, reducers and emulated devices write here; `launch.run` hands the spans back. Appending a
tuple costs well under a microsecond, so recording is on whenever a `recording()` block is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from course_lib.timeline import Span, Timeline

now = time.perf_counter_ns
"""The clock of every span: monotonic, nanoseconds, the same for all processes of one machine."""


class Recorder:
    """Spans of this rank. Threads may append at the same time (`list.append` is atomic)."""

    def __init__(self, rank: int = 0, provenance: str = "measured (cpu)") -> None:
        self.rank, self.provenance, self.step = rank, provenance, -1
        self.rows: list[tuple] = []

    def add(self, kind: str, lane: str, name: str, start: int, stop: int, bytes: int = -1, bucket: int = -1,
            step: int | None = None) -> None:
        """Append one span. `step` defaults to the step that is being measured now."""
        self.rows.append((self.rank, kind, lane, name, start, stop, bytes, bucket, self.step if step is None else step))

    @contextmanager
    def span(self, kind: str, name: str, lane: str = "host") -> Iterator[None]:
        start = now()
        try:
            yield
        finally:
            self.add(kind, lane, name, start, now())

    @contextmanager
    def measure_step(self, index: int) -> Iterator[None]:
        """Mark one step. Everything recorded inside carries its index."""
        self.step, start = index, now()
        try:
            yield
        finally:
            self.add("step", "step", f"step {index}", start, now())
            self.step = -1

    def timeline(self) -> Timeline:
        return Timeline.of((Span(*r) for r in self.rows), self.provenance)


_active: Recorder | None = None
_bucket: ContextVar[int] = ContextVar("bucket", default=-1)


@contextmanager
def tag(bucket: int) -> Iterator[None]:
    """Collectives issued inside the block carry this bucket number."""
    token = _bucket.set(bucket)
    try:
        yield
    finally:
        _bucket.reset(token)


def tagged() -> int:
    """The bucket number of the innermost `tag()` block, or -1."""
    return _bucket.get()


def active() -> Recorder | None:
    """The recorder of the innermost `recording()` block of this process, or None."""
    return _active


@contextmanager
def recording(rank: int = 0, provenance: str = "measured (cpu)", into: Recorder | None = None) -> Iterator[Recorder]:
    """Record everything this process does inside the block, in a new recorder or in `into`.

    >>> with recording() as rec:
    ...     with rec.measure_step(0):
    ...         pass
    >>> [s.kind for s in rec.timeline()]
    ['step']
    """
    global _active
    before, _active = _active, into or Recorder(rank, provenance)
    try:
        yield _active
    finally:
        _active = before
