"""Exercises 1.1 to 1.3: right answers of several kinds pass, and odd ones are told what is odd."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.lab import evaluate
from course_lib.plan import volumes
from course_lib.plan.memory import states


def steps(B, b, D):
    if not all(value >= 1 for value in (B, b, D)):
        raise ValueError(f"all of {B}, {b}, {D} are at least one")
    N, rest = divmod(B, b * D)
    if rest:
        raise ValueError(f"{rest} samples are left over")
    return N


def memory(parameters, D, stage):
    return np.array(states(parameters, stage=stage, D=D), dtype=float)


def traffic(kind, n, N, G, A, layers):
    if kind == "DP":
        return volumes.all_reduce_bytes(G, n)
    if kind == "PP":
        return np.float32(N * (A + A))
    return sum(2 * each(A, n) for each in [volumes.shuffle_bytes] * (2 if kind == "EP" else 4)) * layers * N


def whole_bytes(kind, n, N, G, A, layers):
    return {"DP": 2 * (n - 1) * G // n, "TP": 8 * (n - 1) * layers * N * A // n, "PP": 2 * N * A,
            "EP": 4 * (n - 1) * layers * N * A // n}[kind]  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_the_right_answers_pass_whatever_is_drawn(seed: int) -> None:
    assert evaluate("1.1", steps, seed=seed).ok
    assert evaluate("1.1", lambda B, b, D: np.int64(steps(B, b, D)), seed=seed).ok
    assert evaluate("1.1", volumes.accumulation_steps, seed=seed).ok
    assert evaluate("1.2", memory, seed=seed).ok
    assert evaluate("1.3", traffic, seed=seed).ok
    assert evaluate("1.3", whole_bytes, seed=seed).ok


def unsure(B, b, D):
    raise ValueError("I cannot say")


@pytest.mark.parametrize(
    ("number", "answer", "row"),
    [
        ("1.1", unsure, "the example of the text"),
        ("1.1", lambda B, b, D: [B], "returns a number"),
        ("1.1", lambda B, b, D: float("inf"), "N·b·D gives B back"),
        ("1.1", lambda B, b, D: float("nan"), "N·b·D gives B back"),
        ("1.1", lambda B, b, D: B.nothing, "your code runs without an exception"),
        ("1.2", lambda parameters, D, stage: 16 * parameters, "returns three byte counts"),
        ("1.2", lambda parameters, D, stage: (1, 2), "returns three byte counts"),
        ("1.2", lambda parameters, D, stage: memory(parameters, D, stage)[::-1], "stage 0: everything on every rank"),
        ("1.3", lambda *arguments: "many", "returns a number"),
        ("1.3", lambda *arguments: 0, "data parallel"),
        ("1.3", lambda kind: 0, "your code runs without an exception"),
    ],
)
def test_odd_answers(number: str, answer, row: str) -> None:
    result = evaluate(number, answer, seed=0)
    assert not result.ok and row in [each.name for each in result.rows if not each.ok]


def test_rounding_to_the_nearest_is_neither_floor_nor_ceil() -> None:
    def rounded(B, b, D):
        if min(B, b, D) < 1:
            raise ValueError("anything below 1 is refused")
        return round(B / (b * D))

    result = evaluate("1.1", rounded, seed=0)
    assert not result.ok and result.mistake == ""


def test_two_mistakes_in_one_answer_are_told_one_at_a_time() -> None:
    def answer(kind, n, N, G, A, layers):
        wrong = {"DP": 2 * G, "TP": 4 * layers * volumes.all_reduce_bytes(A, n), "PP": 2 * A}
        return wrong.get(kind) or volumes.expert_parallel_bytes(A, n, layers, N)

    result = evaluate("1.3", answer, seed=5)
    assert result.mistake == "two_S" and [row.ok for row in result.rows] == [False, False, False, True]
