"""Communication and the end of backward: what is still exposed behind it, and whether the wire was behind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from course_lib.overlap import Report
from course_lib.timeline import Span, intersect, length, subtract, union
from course_lib.trace.classify import collective
from course_lib.trace.reader import RankTrace, Trace


def moves(s: Span) -> bool:
    """Whether a span is a transfer; a send or receive of no bucket may be a pipeline's that waits for another stage."""
    return s.kind == "comm" and not (s.bucket < 0 and collective(s.name) == "send/recv")


class Tail(NamedTuple):
    """Communication in ns, over ranks whose compute is known: `exposed` in all, `after` the end of backward, and all
    that runs `before` it. `first` of `total` transfers start before it. `queued`: of `after`, on ranks and steps
    whose wire is busy when backward ends, what runs before the last large transfer begins."""

    exposed: int
    after: int
    before: int
    first: int
    total: int
    queued: int
    ranks: tuple[int, ...]

    @property
    def backlog(self) -> bool:
        return self.queued > 0.5 * self.after > 0


def tail_of(trace: Trace, found: Report) -> Tail:
    exposed = behind = before = first = total = queued = 0
    ranks = set()
    known = {(row.rank, row.step) for row in found.rows if row.hidden is not None}
    for r in trace.ranks:
        ends, compute = backward_ends(r), merged(s for s in r.timeline if s.kind == "compute")
        windows = {s.step: (s.start, s.stop) for s in r.timeline if s.kind == "step"}
        transfers: dict[int, list[Span]] = defaultdict(list)
        for s in filter(moves, r.timeline):
            transfers[max(s.step, -1)].append(s)
        for step in sorted(step for step in ends if (r.rank, step) in known):
            begin, end = windows.get(step, (-2**62, 2**62))
            comm = [*(transfers[step] if step >= 0 else ()), *(s for s in transfers[-1] if begin <= s.start < end)]
            bare, after = subtract(merged(comm), compute), np.array([(ends[step], 2**62)], np.int64)
            tail = length(intersect(bare, after))
            before += length(subtract(merged(comm), after))
            behind, exposed, total = behind + tail, exposed + length(bare), total + len(comm)
            first += sum(s.start < ends[step] for s in comm)
            if any(s.start < ends[step] < s.stop for s in comm):
                large = 0.1 * max(s.stop - s.start for s in comm)  # not that of a loss
                last = max(s.start for s in comm if s.stop - s.start >= large)
                queued += length(intersect(bare, np.array([(ends[step], max(last, ends[step]))], np.int64)))
            if tail:
                ranks.add(r.rank)
    return Tail(exposed, behind, before, first, total, queued, tuple(sorted(ranks)))


def backward_ends(r: RankTrace) -> dict[int, int]:
    """Per step, when the backward's compute was done: on the device if it was launched to one, else on the host."""
    ends: dict[int, int] = {}
    for k in r.facts.launched:
        if k.backward and k.kind == "compute":
            ends[k.step] = max(k.stop, ends.get(k.step, k.stop))
    return ends or r.facts.backward_end


def merged(spans: Iterable[Span]) -> np.ndarray:
    return union(np.array([(s.start, s.stop) for s in spans], np.int64).reshape(-1, 2))
