"""Interval sets against brute force on a small integer grid, and the table's own rules."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.timeline import Span, Timeline, intersect, length, subtract, union

GRID = 14
edge = st.integers(0, GRID)
intervals = st.lists(st.tuples(edge, edge).map(sorted), max_size=6)


def array(pairs) -> np.ndarray:
    return np.array(list(pairs), np.int64).reshape(-1, 2)


def cells(pairs) -> set[int]:
    """The unit cells [k, k+1) that half-open intervals cover."""
    return {k for start, stop in pairs for k in range(start, stop)}


def assert_is_set(result: np.ndarray, want: set[int]) -> None:
    """Right cells, and in canonical form: sorted, disjoint, not touching, none empty."""
    rows = result.tolist()
    assert cells(rows) == want
    assert length(result) == len(want)
    assert all(start < stop for start, stop in rows)
    assert all(a[1] < b[0] for a, b in pairwise(rows))
    assert result.dtype == np.int64


@given(intervals)
def test_union_covers_the_same_cells(a):
    assert_is_set(union(array(a)), cells(a))


@given(intervals, intervals)
def test_intersect_and_subtract_cover_the_same_cells(a, b):
    assert_is_set(intersect(array(a), array(b)), cells(a) & cells(b))
    assert_is_set(subtract(array(a), array(b)), cells(a) - cells(b))


@given(intervals, intervals)
def test_hidden_and_exposed_add_up(a, b):
    a, b = array(a), array(b)
    assert length(intersect(a, b)) + length(subtract(a, b)) == length(union(a))


@pytest.mark.parametrize("pairs, want", [
    ([], []),
    ([(3, 3)], []),
    ([(0, 2), (2, 5)], [[0, 5]]),
    ([(4, 6), (0, 10), (2, 3)], [[0, 10]]),
    ([(5, 7), (0, 1), (0, 0)], [[0, 1], [5, 7]]),
])
def test_union_by_hand(pairs, want):
    assert union(array(pairs)).tolist() == want


def test_nanoseconds_of_a_long_uptime_stay_exact():
    base = 2**62
    assert length(subtract(array([(base, base + 3)]), array([(base + 1, base + 2)]))) == 2


def span(start: int, stop: int, *, kind: str = "compute", rank: int = 0, step: int = -1, bucket: int = -1) -> Span:
    return Span(rank, kind, "device", f"{kind} {start}", start, stop, bucket=bucket, step=step)


def test_spans_are_sorted_by_rank_then_start():
    t = Timeline.of([span(5, 9), span(1, 2, rank=1), span(0, 3)])
    assert [(s.rank, s.start) for s in t] == [(0, 0), (0, 5), (1, 1)]
    assert t.ranks == [0, 1] and len(t) == 3


def test_select_shifts_and_merges():
    one = Timeline.of([span(100, 200, step=0, bucket=3), span(90, 300, kind="step", step=0)], "simulated")
    two = Timeline.of([span(110, 120, rank=1, step=0)], "measured (cpu)")
    both = Timeline.merge([one, two])
    assert both.provenance == "simulated" and both.steps == [0]
    assert [s.start for s in both.select(kind="compute", step=0)] == [100, 110]
    assert [s.rank for s in both.select(rank=1)] == [1]
    assert len(both.select(bucket=3)) == 1
    assert both.shifted().intervals().tolist() == [[0, 210], [10, 110], [20, 30]]
    assert both.shifted(origin=90).spans == both.shifted().spans


def test_empty_timeline():
    t = Timeline.of([])
    assert t.ranks == [] and t.steps == [] and t.intervals().shape == (0, 2)
    assert len(t.shifted()) == 0 and len(Timeline.merge([])) == 0


def test_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="kind 'kernel'; known kinds: compute"):
        Timeline.of([span(0, 1, kind="kernel")])
    with pytest.raises(ValueError, match="ends 4 ns before it starts"):
        Timeline.of([span(5, 1)])
