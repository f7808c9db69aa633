"""Exercise 4.5: right answers of several kinds pass, slow ones are told why, and odd ones what is odd."""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.lab import CheckFailed, evaluate
from course_lib.lab.exercises.lab04.plan_cases import Case, all_plans, best_finish, drawn


def table(sizes_bytes, ready_s, a_s, beta_s_per_byte):
    n = len(sizes_bytes)
    soonest, cut = [0.0], [0]
    for j in range(1, n + 1):
        finish = {
            i: max(soonest[i], ready_s[j - 1]) + a_s + beta_s_per_byte * sum(sizes_bytes[i:j]) for i in range(j)
        }
        cut.append(min(finish, key=finish.get))
        soonest.append(finish[cut[j]])
    plan = []
    while n:
        plan.insert(0, n - cut[n])
        n = cut[n]
    return plan


def recursion(sizes_bytes, ready_s, a_s, beta_s_per_byte):
    """The same from the top, remembered; takes the last of equal cuts."""

    @lru_cache(None)
    def best(j):
        if j == 0:
            return 0.0, ()
        found = []
        for i in range(j):
            before, plan = best(i)
            found.append((max(before, ready_s[j - 1]) + a_s + beta_s_per_byte * sum(sizes_bytes[i:j]), (*plan, j - i)))
        return min(found)

    return best(len(sizes_bytes))[1]


def numpy_table(sizes_bytes, ready_s, a_s, beta_s_per_byte):
    held = np.concatenate(([0], np.cumsum(sizes_bytes)))
    soonest, cut = np.zeros(len(held)), np.zeros(len(held), int)
    for j in range(1, len(held)):
        finish = np.maximum(soonest[:j], ready_s[j - 1]) + a_s + beta_s_per_byte * (held[j] - held[:j])
        cut[j] = finish.argmin()
        soonest[j] = finish[cut[j]]
    ends = [len(held) - 1]
    while ends[-1]:
        ends.append(cut[ends[-1]])
    return -np.diff(ends)[::-1]


def forward_labels(sizes_bytes, ready_s, a_s, beta_s_per_byte):
    """Pushes each prefix's finish to all longer ones, with the plan beside it."""
    n = len(sizes_bytes)
    label = {0: (0.0, [])}
    for i in range(n):
        finish, plan = label[i]
        for j, held in enumerate(accumulate(sizes_bytes[i:]), start=i + 1):
            f = max(finish, ready_s[j - 1]) + a_s + beta_s_per_byte * held
            if j not in label or f < label[j][0]:
                label[j] = (f, [*plan, j - i])
    return label[n][1]


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
@pytest.mark.parametrize("answer", [table, recursion, numpy_table, forward_labels])
def test_the_right_answers_pass_whatever_is_drawn(answer, seed: int) -> None:
    result = evaluate("4.5", answer, seed=seed)
    assert result.ok, [row for row in result.rows if not row.ok]


def tries_all(sizes_bytes, ready_s, a_s, beta_s_per_byte):
    def finish(plan):
        f = start = 0
        for length in plan:
            f = max(f, ready_s[start + length - 1]) + a_s + beta_s_per_byte * sum(sizes_bytes[start : start + length])
            start += length
        return f

    n = len(sizes_bytes)
    plans = ([b - a for a, b in pairwise((0, *cut, n))] for k in range(n) for cut in combinations(range(1, n), k))
    return min(plans, key=finish)


def test_trying_all_plans_is_told_why_it_is_too_slow() -> None:
    result = evaluate("4.5", tries_all, seed=0)
    assert result.mistake == "exponential" and "2ⁿ⁻¹" in result.diagnosis
    assert [row.ok for row in result.rows] == [True, True, False]
    assert result.rows[-1].seen == "still running after 1 s; 30 gradients have 5.4e+08 plans"


@pytest.mark.parametrize("change", [lambda plan: plan, lambda plan: [sum(plan)], lambda plan: [*plan, 1]])
def test_what_is_wrong_for_long_lists_only_fails_its_row(change) -> None:
    result = evaluate("4.5", lambda *given: change(table(*given)) if len(given[0]) > 10 else table(*given), seed=1)
    assert result.ok == (change([1, 2]) == [1, 2])
    if not result.ok:
        assert [row.ok for row in result.rows] == [True, True, False] and not result.mistake


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        (lambda *_: "no plan", "gave 'no plan'"),
        (lambda *_: [[0], [1, 2]], "gave [[0], [1, 2]]"),
        (lambda *_: [0.5, 2.5], "gave [0.5, 2.5]"),
        (lambda sizes, *_: [0, len(sizes)], "gave [0, 3]"),
        (lambda sizes, *_: [], "gave []"),
        (lambda sizes, *_: [float("nan")], "gave [nan]"),
        (lambda sizes: [1], "TypeError"),
        (lambda sizes, *_: [sizes[99]], "IndexError"),
    ],
)
def test_odd_answers(answer, seen: str) -> None:
    result = evaluate("4.5", answer, seed=0)
    assert not result.ok and seen in result.rows[0].seen
    assert not result.mistake and 'hint("4.5")' in result.diagnosis


def test_a_loop_that_never_ends_on_a_short_list() -> None:
    def forever(*_):
        while True:
            pass

    result = evaluate("4.5", forever, seed=0)
    assert not result.mistake and "still running after 8 s" in result.rows[0].seen


def test_a_stub_says_so() -> None:
    def best_plan(sizes_bytes, ready_s, a_s, beta_s_per_byte):
        raise NotImplementedError("exercise 4.5")

    with pytest.raises(CheckFailed, match=r"^exercise 4\.5 is not written yet"):
        evaluate("4.5", best_plan)


@given(st.integers(0, 10**6), st.integers(1, 9))
def test_the_library_agrees_with_all_plans(seed: int, count: int) -> None:
    given_ = drawn(random.Random(seed), count)
    case = Case(*given_, [])
    assert len(set(all_plans(count))) == 2 ** (count - 1)
    assert best_finish(*given_) == pytest.approx(min(map(case.last, all_plans(count))), rel=1e-12)
