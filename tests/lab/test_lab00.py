"""Exercises 0.1 and 0.2: right answers of several kinds pass, and odd ones are told what is odd."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.lab import evaluate


def part_of_mean(rank, ranks, numbers):
    total = 0
    for place in range(rank, len(numbers), ranks):
        total += numbers[place] / len(numbers)
    return np.float64(total)


def exposed_ms(compute, comm):
    """By sweeping over all edges instead of counting milliseconds."""
    edges = sorted({edge for span in (*compute, *comm) for edge in span})
    total = 0
    for start, stop in pairwise(edges):
        sent = any(a <= start and stop <= b for a, b in comm)
        computed = any(a <= start and stop <= b for a, b in compute)
        total += (stop - start) * (sent and not computed)
    return float(total)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_the_right_answers_pass_whatever_is_drawn(seed: int) -> None:
    assert evaluate("0.1", part_of_mean, seed=seed).ok
    assert evaluate("0.2", exposed_ms, seed=seed).ok


@pytest.mark.parametrize(
    ("number", "answer", "row"),
    [
        ("0.1", lambda rank, ranks, numbers: "3", None),
        ("0.1", lambda rank, ranks, numbers: numbers[rank::ranks], "returns a number"),
        ("0.1", lambda rank, ranks, numbers: -1.0, "the example of the text"),
        ("0.2", lambda compute, comm: comm, "returns a number"),
        ("0.2", lambda compute, comm: 3, "one transfer at a time"),
        ("0.2", lambda compute, comm: float("nan"), "the example of the text"),
        ("0.2", lambda compute, comm: compute[0][0], "your code runs without an exception"),
    ],
)
def test_odd_answers(number: str, answer, row: str | None) -> None:
    result = evaluate(number, answer, seed=0)
    assert not result.ok
    assert row is None or row in [each.name for each in result.rows if not each.ok]


@pytest.mark.parametrize(
    "answer",
    [
        lambda rank, ranks, numbers: sum(numbers[rank + 1 :: ranks]) / len(numbers),
        lambda rank, ranks, numbers: sum(numbers[rank::ranks]) / len(numbers) / ranks,
        lambda rank, ranks, numbers: sum(x for x in numbers if x % ranks == rank) / len(numbers),
    ],
)
def test_what_is_wrong_for_even_counts_too_is_not_taken_for_a_fault_of_the_rest(answer) -> None:
    for seed in range(3):
        result = evaluate("0.1", answer, seed=seed)
        assert not result.ok and result.mistake == ""


def test_what_a_check_hands_over_may_be_changed_by_the_answer() -> None:
    def greedy(compute, comm):
        value = exposed_ms(compute, comm)
        compute.clear()
        comm.clear()
        return value

    assert evaluate("0.2", greedy, seed=3).ok
