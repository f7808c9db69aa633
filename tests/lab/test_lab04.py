"""Exercises 4.1 and 4.2: right answers of several kinds pass, and odd ones are told what is odd."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.lab import CheckFailed, evaluate


def assign_buckets(sizes_bytes, cap_bytes):
    left = {}
    for index, _ in sizes_bytes:
        left[index] = left.get(index, 0) + 1
    buckets, total = [[]], 0
    for index, size in reversed(sizes_bytes):
        left[index] -= 1
        if left[index]:
            continue
        if total >= cap_bytes:
            buckets.append([])
            total = 0
        buckets[-1].append(index)
        total += size
    return [bucket for bucket in buckets if bucket]


class Reducer:
    def __init__(self, buckets, uses, wire):
        self.missing = [sum(uses[index] for index in bucket) for bucket in buckets]
        self.bucket_of = {index: b for b, bucket in enumerate(buckets) for index in bucket}
        self.wire, self.handles = wire, []

    def on_gradient_ready(self, index):
        self.missing[self.bucket_of[index]] -= 1
        while len(self.handles) < len(self.missing) and not self.missing[len(self.handles)]:
            self.handles.append(self.wire.launch(len(self.handles)))


@given(st.integers(0, 10**6))
def test_the_right_answers_pass_whatever_is_drawn(seed: int) -> None:
    assert evaluate("4.1", assign_buckets, seed=seed).ok
    assert evaluate("4.2", Reducer, seed=seed).ok


def test_tuples_and_numpy_ids_are_fine() -> None:
    def answer(sizes, cap):
        return tuple(tuple(np.int64(i) for i in bucket) for bucket in assign_buckets(sizes, cap))

    assert evaluate("4.1", answer, seed=0).ok


@pytest.mark.parametrize(
    ("answer", "row"),
    [
        (lambda sizes, cap: 3, "returns a list of lists of ids"),
        (lambda sizes, cap: [i for i, _ in sizes], "returns a list of lists of ids"),
        (lambda sizes, cap: {0: [1]}, "returns a list of lists of ids"),
        (lambda sizes, cap: [[float("inf")]], "returns a list of lists of ids"),
        (lambda sizes, cap: (assign_buckets(sizes, cap), sizes.reverse())[0], "leaves the list it was given as it was"),
        (lambda sizes, cap: [*assign_buckets(sizes, cap), []], "no empty bucket"),
    ],
)
def test_odd_answers_to_4_1(answer, row: str) -> None:
    result = evaluate("4.1", answer, seed=0)
    assert not result.ok and row in [each.name for each in result.rows if not each.ok]
    assert 'hint("4.1")' in result.diagnosis


@pytest.mark.parametrize(
    "answer",
    [
        lambda sizes, cap: assign_buckets(sizes, cap)[::-1],
        lambda sizes, cap: assign_buckets(sorted(sizes), cap),
    ],
)
def test_an_order_of_another_kind_is_not_given_a_hint_about_this_one(answer) -> None:
    for seed in range(3):
        result = evaluate("4.1", answer, seed=seed)
        assert not result.ok and result.mistake == ""


def method(body):
    return type("Reducer", (Reducer,), {"on_gradient_ready": body})


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        (type("Reducer", (), {"__init__": Reducer.__init__}), "has no method `on_gradient_ready`"),
        (method(lambda self, index: self.wire.launch([index])), "launch takes the number of a bucket, 0 to"),
        (method(lambda self: None), "TypeError"),
        (method(lambda self, index: 1 / 0), "ZeroDivisionError: division by zero in line"),
        (method(lambda self, index: exit()), "SystemExit"),
    ],
)
def test_odd_answers_to_4_2(answer: type, seen: str) -> None:
    result = evaluate("4.2", answer, seed=0)
    assert not result.ok and seen in result.rows[0].seen


def test_polling_a_handle_counts_as_waiting() -> None:
    def poll(self, index):
        Reducer.on_gradient_ready(self, index)
        while self.handles and not self.handles[-1].is_completed():
            pass

    assert evaluate("4.2", method(poll), seed=0).mistake == "waits_at_once"


def test_the_same_seed_draws_the_same_cases() -> None:
    drawn: list[list] = [[], []]
    for seen in drawn:
        evaluate(
            "4.1", lambda sizes, cap, seen=seen: seen.append((list(sizes), cap)) or assign_buckets(sizes, cap), seed=7
        )
    assert drawn[0] == drawn[1]


def test_an_instance_is_not_a_class() -> None:
    with pytest.raises(CheckFailed, match="Pass the class itself"):
        evaluate("4.2", Reducer([], {}, None))
