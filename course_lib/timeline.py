"""One table of spans for everything that happens in time, and the interval arithmetic on it.

A profiler trace, a simulated schedule and a live run all become a `Timeline`; every metric, picture,
check and grade is computed from one. Times are integer nanoseconds on one clock for all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

KINDS = ("compute", "comm", "copy", "memset", "step", "fill", "queue", "host")
"""What a span can be. `compute`, `comm`, `copy` and `memset` are device or wire work; `step` is the
window that metrics are taken over; `fill` runs from a bucket's first ready gradient to its last,
`queue` from its launch to its start on the wire; `host` is anything else worth drawing."""


class Span(NamedTuple):
    """One row of a `Timeline`. `start` and `stop` are nanoseconds; -1 means "not known"."""

    rank: int
    kind: str
    lane: str
    name: str
    start: int
    stop: int
    bytes: int = -1
    bucket: int = -1
    step: int = -1


@dataclass(frozen=True)
class Timeline:
    """Spans of one or several ranks, sorted by (rank, start).

    `provenance` says how it was obtained and is printed under every picture: `measured (cuda)`,
    `measured (cpu)`, `measured (real wires, emulated device)` or `simulated`.
    """

    spans: tuple[Span, ...] = ()
    provenance: str = "unknown"

    @classmethod
    def of(cls, spans: Iterable[Span], provenance: str = "unknown") -> Timeline:
        """Build a timeline from spans in any order. Raises `ValueError` on an unknown kind or a
        span that ends before it starts."""
        rows = sorted((Span(*s) for s in spans), key=lambda s: (s.rank, s.start, s.stop))
        for s in rows:
            if s.kind not in KINDS:
                raise ValueError(f"span {s.name!r} has kind {s.kind!r}; known kinds: {', '.join(KINDS)}")
            if s.stop < s.start:
                raise ValueError(f"span {s.name!r} of rank {s.rank} ends {s.start - s.stop} ns before it starts")
        return cls(tuple(rows), provenance)

    @classmethod
    def merge(cls, parts: Iterable[Timeline]) -> Timeline:
        """All ranks in one table. The provenance is the first part's."""
        parts = list(parts)
        return cls.of((s for p in parts for s in p.spans), parts[0].provenance if parts else "unknown")

    def __len__(self) -> int:
        return len(self.spans)

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    def select(self, *, rank: int | None = None, kind: str | None = None, step: int | None = None,
               bucket: int | None = None) -> Timeline:
        """The spans that match every given value."""
        keep = (s for s in self.spans
                if (rank is None or s.rank == rank) and (kind is None or s.kind == kind)
                and (step is None or s.step == step) and (bucket is None or s.bucket == bucket))
        return Timeline(tuple(keep), self.provenance)

    @property
    def ranks(self) -> list[int]:
        return sorted({s.rank for s in self.spans})

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps that have a `step` span, in order."""
        return sorted({s.step for s in self.spans if s.kind == "step"})

    def intervals(self) -> np.ndarray:
        """(n, 2) int64 array of [start, stop) in nanoseconds, unsorted and possibly overlapping."""
        return np.array([(s.start, s.stop) for s in self.spans], np.int64).reshape(-1, 2)

    def shifted(self, origin: int | None = None) -> Timeline:
        """The same spans with `origin` (the earliest start by default) at 0."""
        if origin is None:
            origin = min((s.start for s in self.spans), default=0)
        return Timeline(tuple(s._replace(start=s.start - origin, stop=s.stop - origin) for s in self.spans),
                        self.provenance)


# Interval sets: (n, 2) int64 arrays of half-open [start, stop), disjoint, sorted, none empty.

def union(intervals: np.ndarray) -> np.ndarray:
    """The set covered by any of the intervals. Touching intervals are joined, empty ones vanish."""
    iv = np.asarray(intervals, np.int64).reshape(-1, 2)
    iv = iv[iv[:, 1] > iv[:, 0]]
    if not len(iv):
        return iv
    iv = iv[np.argsort(iv[:, 0], kind="stable")]
    reach = np.maximum.accumulate(iv[:, 1])
    first = np.concatenate(([True], iv[1:, 0] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((iv[first, 0], reach[last]), axis=1)


def length(intervals: np.ndarray) -> int:
    """Total nanoseconds covered by an interval set (disjoint, as `union` returns)."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def _covered_twice(a: np.ndarray, b: np.ndarray, want: int, weight: int) -> np.ndarray:
    """Sweep over the edges of two sets; keep where `inside a + weight·inside b == want`."""
    edges = np.concatenate((a[:, 0], a[:, 1], b[:, 0], b[:, 1]))
    delta = np.concatenate((np.ones(len(a)), -np.ones(len(a)), weight * np.ones(len(b)), -weight * np.ones(len(b))))
    order = np.argsort(edges, kind="stable")
    edges, depth = edges[order], np.cumsum(delta[order]).astype(np.int64)
    keep = depth[:-1] == want
    return union(np.stack((edges[:-1][keep], edges[1:][keep]), axis=1))


def intersect(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A ∩ B of two interval sets."""
    return _covered_twice(union(a), union(b), want=3, weight=2)


def subtract(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A − B of two interval sets."""
    return _covered_twice(union(a), union(b), want=1, weight=2)
