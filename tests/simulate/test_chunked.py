"""Operators in chunks against closed forms, against a brute-force clock, and against what cannot be beaten."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import overlap
from course_lib.link_cost import LinkCost
from course_lib.simulate.chunked import Operator, hideable_s, predict_chunked, step_s

times = st.floats(0.01, 1.0)
operators = st.builds(Operator, st.sampled_from(["gather", "scatter"]), times, st.floats(1, 100),
                      st.builds(LinkCost, st.floats(0, 0.01), st.floats(1e-4, 1e-2)), st.sampled_from([0.0, 0.3]))


def seconds(operator: Operator, chunks: int | None) -> float:
    return step_s(predict_chunked([operator], chunks))


@settings(max_examples=60, deadline=None)
@given(times, times, st.integers(1, 12), st.sampled_from(["gather", "scatter"]))
def test_without_latency_all_but_one_part_in_k_of_the_shorter_hides(tc, tm, k, kind) -> None:
    one = Operator(kind, tc, 1.0, LinkCost(0.0, tm))
    assert seconds(one, k) == pytest.approx(max(tc, tm) + min(tc, tm) / k, abs=1e-7)
    assert seconds(one, None) == pytest.approx(tc + tm, abs=1e-7)
    assert one.hideable_s == min(tc, tm)


@settings(max_examples=60, deadline=None)
@given(operators, st.integers(1, 9))
def test_as_a_clock_that_follows_the_program(one, k) -> None:
    """The program of `tensor.chunked`, statement by statement, with a device and a wire."""
    part, travel = one.compute_s / k, one.link.cost(one.bytes / k)
    now = free = 0.0
    arrivals = []

    def start() -> None:
        nonlocal free
        free = max(now, free) + travel
        arrivals.append(free)

    if one.kind == "gather":
        start()
        for i in range(k):
            if i + 1 < k:
                start()
            now = max(now, arrivals[i]) + part
        now += one.spare_s
    else:
        for _ in range(k):
            now += part
            start()
        now = max(now + one.spare_s, free)
    assert seconds(one, k) == pytest.approx(now, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.lists(operators, min_size=1, max_size=4), st.integers(1, 9))
def test_nothing_hides_more_than_an_operator_has_and_every_span_is_there(row, k) -> None:
    chunked, waiting = predict_chunked(row, k), predict_chunked(row, None)
    assert step_s(chunked) == pytest.approx(sum(seconds(one, k) for one in row), abs=1e-6)
    assert step_s(waiting) - step_s(chunked) <= hideable_s(row) + 1e-6
    assert overlap.report(waiting).pooled.hidden == 0
    for kind, count in (("comm", k * len(row)), ("compute", k * len(row) + sum(one.spare_s > 0 for one in row))):
        spans = chunked.select(kind=kind)
        assert len(spans) == count
        assert sum(s.stop - s.start for s in spans) / 1e9 == pytest.approx(sum(
            one.compute_s + one.spare_s if kind == "compute" else k * one.link.cost(one.bytes / k) for one in row),
            abs=1e-6)
        ends = [s.stop for s in spans]
        assert all(a <= b.start + 1 for a, b in zip(ends, list(spans)[1:])), "one thing at a time"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="gathers before its matmul"):
        Operator("reduce", 1.0, 1.0, LinkCost(0, 1))
    with pytest.raises(ValueError, match="compute_s=-1"):
        Operator("gather", -1, 1.0, LinkCost(0, 1))
    with pytest.raises(ValueError, match="chunks=0"):
        predict_chunked([], 0)
