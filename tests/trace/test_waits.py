"""Waiting and moving are parts of a rank's communication time, however its collectives lie."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import trace
from course_lib.timeline import Span, Timeline
from course_lib.trace.facts import Facts
from course_lib.trace.measure import pooled_rows, pooled_waits

NAMES = ("gloo:all_reduce", "broadcast", "reduce", "send", "gloo:all_gather")


def traced(spans: list[Span], device: str = "cpu") -> trace.Trace:
    line = Timeline.of(spans, "measured (cpu)")
    return trace.Trace(line, tuple(trace.RankTrace(rank, f"{rank}.json", line.select(rank=rank), Facts(device), ())
                                   for rank in line.ranks))


def test_overlapping_waits_count_once_and_not_while_bytes_move() -> None:
    """Rank 0 is in two collectives at a time, 10-60 and 20-90; rank 1 comes to them at 40 and 70."""
    spans = [Span(rank, "step", "step", "step 0", 0, 100, step=0) for rank in (0, 1)]
    spans += [Span(rank, "comm", lane, "gloo:all_reduce", start, stop, step=0) for rank, lane, start, stop in (
        (0, "gloo 0", 10, 60), (0, "gloo 1", 20, 90), (1, "gloo 0", 40, 60), (1, "gloo 1", 70, 90))]
    assert trace.waits(trace.measure(traced(spans))) == {(0, 0): (40, 40), (1, 0): (0, 40)}


def test_a_rank_that_is_let_go_first_waits_and_moves_no_longer_than_it_is_there() -> None:
    """The second to come is let go 5 later than the first, which so saw 15 of the 20 that the wire took; a root that
    handed over before the receiver came saw nothing move."""
    spans = [Span(rank, "step", "step", "step 0", 0, 100, step=0) for rank in (0, 1)]
    spans += [Span(rank, "comm", "gloo 0", name, start, stop, step=0) for rank, name, start, stop in (
        (0, "gloo:all_reduce", 10, 45), (1, "gloo:all_reduce", 30, 50), (0, "broadcast", 60, 62),
        (1, "broadcast", 70, 80))]
    assert trace.waits(trace.measure(traced(spans))) == {(0, 0): (20 + 2, 15), (1, 0): (0, 20 + 10)}


@st.composite
def traces(draw) -> trace.Trace:
    """Up to three ranks and steps. Collectives in any order on three lanes, also from before their step, into the next
    one, of length 0 and missing on some rank; ranks without compute."""
    spans: list[Span] = []
    for rank in range(draw(st.integers(1, 3))):
        shift = draw(st.integers(0, 20))
        computes = draw(st.booleans())
        for step in range(draw(st.integers(1, 3))):
            begin = 100 * step + shift
            spans.append(Span(rank, "step", "step", f"step {step}", begin, begin + 80, step=step))
            kinds = st.tuples(st.sampled_from(("comm", "compute") if computes else ("comm",)), st.sampled_from(NAMES),
                              st.integers(-10, 90), st.integers(0, 60), st.integers(0, 2))
            spans += (Span(rank, kind, f"{kind} {lane}", name, begin + at, begin + at + long, step=step)
                      for kind, name, at, long, lane in draw(st.lists(kinds, max_size=6)))
    return traced(spans, draw(st.sampled_from(("cpu", "cuda"))))


@settings(max_examples=200, deadline=None)
@given(traces())
def test_wait_and_transfer_never_exceed_the_communication_of_their_row(loaded: trace.Trace) -> None:
    found = trace.measure(loaded)
    each, pooled = trace.waits(found), pooled_waits(found)
    for row in (*found.rows, *found.ranks, found.pooled):
        parts = (each if row.step is not None else pooled).get((row.rank, row.step))
        if parts is not None:
            assert min(parts) >= 0 and sum(parts) <= row.comm, (row, parts)


@settings(max_examples=200, deadline=None)
@given(traces())
def test_waits_are_those_counted_moment_by_moment(loaded: trace.Trace) -> None:
    found = trace.measure(loaded)
    begins = {(s.rank, s.step): s.start for s in loaded.timeline if s.kind == "step"}
    waiting: dict[tuple[int, int], set[int]] = {}
    moving: dict[tuple[int, int], set[int]] = {}
    for c in found.collectives:
        for rank, wait in c.wait or ():
            mine = [s for s in loaded.timeline if (s.rank, s.kind, s.step, s.name) == (rank, "comm", c.step, c.name)]
            s, key = mine[c.sequence], (rank, c.step)
            there = set(range(max(s.start, begins[key]), s.stop))
            arrived = s.start + wait
            waiting.setdefault(key, set()).update(t for t in there if t < arrived)
            moving.setdefault(key, set()).update(t for t in there if arrived <= t < arrived + c.transfer)
    assert trace.waits(found) == {key: (len(waiting[key] - moving[key]), len(moving[key])) for key in waiting}


@settings(max_examples=200, deadline=None)
@given(traces())
def test_pooled_rows_are_those_that_the_report_pools(loaded: trace.Trace) -> None:
    found = trace.measure(loaded)
    for pool in (*found.ranks, found.pooled):
        rows = pooled_rows(found, pool.rank)
        assert len(rows) == pool.steps
        assert sum(r.span for r in rows) == pool.span
        assert sum(r.comm or 0 for r in rows) == (pool.comm or 0)
