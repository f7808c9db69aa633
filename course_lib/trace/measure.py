"""A trace in numbers: `overlap.report`, with the step time of a CPU rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from course_lib.overlap import Report, Row, report
from course_lib.timeline import Span, Timeline, length, subtract, union
from course_lib.trace.note import TraceError
from course_lib.trace.reader import Trace


@dataclass(frozen=True)
class Measured(Report):
    """A report that keeps its timeline, on which `waits` sees what overlaps."""

    timeline: Timeline


def measure(trace: Trace, step: int | None = None) -> Measured:
    """Every rank and step, or one step only. Raises `TraceError` if the trace has no such step.

    Where the host computes, a step ends with the host's step and not with its last operator. Where it also moves bytes
    in groups of some ranks, which no span names, collectives are not matched over ranks: what waits cannot be known.
    """
    timeline = trace.timeline
    if step is not None:
        if step not in timeline.steps:
            raise TraceError(f"step {step} is not in this trace; it has "
                             f"{', '.join(map(str, timeline.steps)) or 'no marked steps'}")
        timeline = replace(timeline, spans=tuple(s for s in timeline.spans if s.kind != "step" or s.step == step))
        # Work of other steps would make a step of its own out of a rank that lacks the one asked for.
        having = {s.rank for s in timeline.spans if s.kind == "step"}
        timeline = replace(timeline, spans=tuple(s for s in timeline.spans if s.rank in having))
    found = Measured(**vars(report(timeline)), timeline=timeline)
    if any(r.facts.parted for r in trace.ranks):
        alone = tuple(replace(c, wait=None, transfer=None, late=()) for c in found.collectives)
        found = replace(found, collectives=alone, late=())
    hosts = {r.rank for r in trace.ranks if r.facts.device == "cpu"}
    windows = {(s.rank, s.step): s.stop - s.start for s in timeline if s.kind == "step" and s.rank in hosts}
    if not windows:
        return found
    rows = tuple(_lasting(r, windows.get((r.rank, r.step))) for r in found.rows)
    extra: dict[tuple[int | None, int | None], int] = {}
    slowest: dict[int | None, int] = defaultdict(int)
    for before, after in zip(found.rows, rows):
        slowest[after.step] = max(slowest[after.step], after.span)
        extra[after.rank, after.step] = after.span - before.span

    def lasting(pool: Row) -> Row:
        return replace(pool, span=pool.span + sum(extra[r.rank, r.step] for r in pooled_rows(found, pool.rank)))

    return replace(found, rows=rows, ranks=tuple(lasting(r) for r in found.ranks), pooled=lasting(found.pooled),
                   step_times=tuple(slowest[k] for k in sorted(slowest)))


def _lasting(row: Row, window: int | None) -> Row:
    return row if window is None else replace(row, span=max(row.span, window))


def pooled_rows(found: Report, rank: int | None) -> list[Row]:
    """The rows that the report pools for this rank (None: for all): those that cannot know do not count as 0."""
    rows = [r for r in found.rows if rank is None or r.rank == rank]
    known = [r for r in rows if r.comm == 0 or r.hidden is not None]
    return known or [r for r in rows if r.comm is not None] or rows


def waits(found: Report) -> dict[tuple[int, int], tuple[int, int]]:
    """Per rank and step, (time that it only waited for the last rank to arrive, time that bytes moved) in ns, over the
    collectives that could be matched; what has none is missing.

    Of what `measure` found, both are parts of the rank's communication time |M| and have nothing in common: of
    collectives that overlap each moment counts once, and as a transfer if any of them moves bytes. A plain report has
    no spans left: there every collective counts for itself.
    """
    if not isinstance(found, Measured):
        return _sums(found)
    own: dict[tuple[int, int, int, str], list[Span]] = defaultdict(list)
    for s in found.timeline:
        if s.kind == "comm":
            own[s.rank, s.step, s.bucket, s.name].append(s)
    begins = {(s.rank, s.step): s.start for s in found.timeline if s.kind == "step"}
    parts: dict[tuple[int, int], tuple[list, list]] = defaultdict(lambda: ([], []))
    for c in found.collectives:
        for rank, wait in c.wait or ():
            s = own[rank, c.step, c.bucket, c.name][c.sequence]
            begin, arrived = max(s.start, begins.get((rank, c.step), s.start)), s.start + wait
            waited, moved = parts[rank, c.step]
            waited.append((begin, min(s.stop, arrived)))
            moved.append((max(begin, arrived), min(s.stop, arrived + (c.transfer or 0))))
    return {key: (length(subtract(_set(waited), _set(moved))), length(_set(moved)))
            for key, (waited, moved) in parts.items()}


def pooled_waits(found: Report) -> dict[tuple[int | None, None], tuple[int, int]]:
    """`waits` of the rows of each rank and, as (None, None), of all, added up as the report adds up the rest."""
    each, out = waits(found), {}
    for pool in (*found.ranks, found.pooled):
        mine = [each[r.rank, r.step] for r in pooled_rows(found, pool.rank) if (r.rank, r.step) in each]
        if mine:
            out[pool.rank, None] = (sum(w for w, _ in mine), sum(t for _, t in mine))
    return out


def _sums(found: Report) -> dict[tuple[int, int], tuple[int, int]]:
    total: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
    for c in found.collectives:
        for rank, wait in c.wait or ():
            total[rank, c.step][0] += wait
            total[rank, c.step][1] += c.transfer or 0
    return {key: (wait, transfer) for key, (wait, transfer) in total.items()}


def _set(intervals: Iterable[tuple[int, int]]) -> np.ndarray:
    return union(np.array(list(intervals), np.int64).reshape(-1, 2))
