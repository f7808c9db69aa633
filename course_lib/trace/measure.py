"""A trace in numbers: `overlap.report`, with the step time of a CPU rank as `metrics.md` defines it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from course_lib.overlap import Report, Row, report
from course_lib.trace.note import TraceError
from course_lib.trace.reader import Trace


def measure(trace: Trace, step: int | None = None) -> Report:
    """Every rank and step, or one step only. Raises `TraceError` if the trace has no such step.

    Where the host computes, a step ends with the host's step and not with its last operator.
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
    found = report(timeline)
    hosts = {r.rank for r in trace.ranks if r.facts.device == "cpu"}
    windows = {(s.rank, s.step): s.stop - s.start for s in timeline if s.kind == "step" and s.rank in hosts}
    if not windows:
        return found
    rows = tuple(_lasting(r, windows.get((r.rank, r.step))) for r in found.rows)
    extra: dict[int | None, int] = defaultdict(int)
    slowest: dict[int | None, int] = defaultdict(int)
    for before, after in zip(found.rows, rows):
        slowest[after.step] = max(slowest[after.step], after.span)
        if before.comm == 0 or before.hidden is not None:
            extra[after.rank] += after.span - before.span
    ranks = tuple(replace(r, span=r.span + extra[r.rank]) for r in found.ranks)
    return replace(found, rows=rows, ranks=ranks, step_times=tuple(slowest[k] for k in sorted(slowest)),
                   pooled=replace(found.pooled, span=found.pooled.span + sum(extra.values())))


def _lasting(row: Row, window: int | None) -> Row:
    return row if window is None else replace(row, span=max(row.span, window))


def waits(found: Report) -> dict[tuple[int, int], tuple[int, int]]:
    """Per rank and step, (time spent waiting for the last rank to arrive, time of the transfers themselves) in ns, over
    the collectives that could be matched; what has none is missing."""
    total: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
    for c in found.collectives:
        for rank, wait in c.wait or ():
            total[rank, c.step][0] += wait
            total[rank, c.step][1] += c.transfer or 0
    return {key: (wait, transfer) for key, (wait, transfer) in total.items()}
