"""Exercise 4.4: right answers of several kinds pass, and odd ones are told what is odd."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.lab import CheckFailed, evaluate


def counts_calls(seen, uses, broadcast):
    calls, order = Counter(), []
    for index in seen:
        calls[index] += 1
        if calls[index] == uses[index]:
            order.append(index)
    return broadcast(order if len(order) == len(uses) else None)


def from_the_end(seen, uses, broadcast):
    order = None
    if len(seen) == sum(uses.values()):
        order = list(dict.fromkeys(reversed(seen)))
        order.reverse()
    agreed = broadcast(order)
    return agreed


def last_places(seen, uses, broadcast):
    """Sends the observation instead of the order, and lets every rank work on rank 0's. As a tuple of numpy ids."""
    seen = broadcast(tuple(seen))
    if sorted(seen) != sorted(Counter(uses).elements()):
        return None
    return tuple(np.array(sorted(uses, key=lambda index: max(i for i, s in enumerate(seen) if s == index))))


def two_broadcasts(seen, uses, broadcast):
    complete = broadcast(Counter(seen) == Counter(uses))
    order = broadcast([index for place, index in enumerate(seen) if index not in seen[place + 1 :]])
    return order if complete else None


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
@pytest.mark.parametrize("answer", [counts_calls, from_the_end, last_places, two_broadcasts])
def test_the_right_answers_pass_whatever_is_drawn(answer, seed: int) -> None:
    result = evaluate("4.4", answer, seed=seed)
    assert result.ok, [row for row in result.rows if not row.ok]


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        (lambda seen, uses, broadcast: broadcast(3), "rank 0 returned 3"),
        (lambda seen, uses, broadcast: broadcast([seen]), "returned [["),
        (lambda seen, uses, broadcast: broadcast("none"), "returned 'none'"),
        (lambda seen, uses, broadcast: broadcast([1.5]), "returned [1.5]"),
        (lambda seen, uses: None, "TypeError"),
        (lambda seen, uses, broadcast: broadcast(seen[99]), "on rank 0 raised IndexError"),
    ],
)
def test_odd_answers(answer, seen: str) -> None:
    result = evaluate("4.4", answer, seed=0)
    assert not result.ok and seen in result.rows[0].seen
    assert not result.mistake and 'hint("4.4")' in result.diagnosis


def test_a_rank_that_asks_once_more_than_rank_0_does_not_hang_the_check() -> None:
    asked = iter(range(10**6))

    def more_each_time(seen, uses, broadcast):
        try:
            for _ in range(1 + next(asked)):
                broadcast(seen)
        except Exception:
            pass

    result = evaluate("4.4", more_each_time, seed=0)
    assert result.mistake == "hangs"
    assert "waits in it for rank 0" in " ".join(row.seen for row in result.rows)


def test_a_stub_says_so() -> None:
    def rebuilt_order(seen, uses, broadcast):
        raise NotImplementedError("exercise 4.4")

    with pytest.raises(CheckFailed, match=r"^exercise 4\.4 is not written yet"):
        evaluate("4.4", rebuilt_order)
