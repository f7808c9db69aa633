"""Every exercise's check outlives every plain value: it says ✘, in words, and raises nothing."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from course_lib.lab import evaluate
from course_lib.lab.guard import call, latest
from course_lib.lab.judging import Stumbled, verdict
from course_lib.lab.model import Exercise, Row, Verdict, exercise
from course_lib.lab.present import result_as_html, result_as_text
from course_lib.lab.registry import everything


class Unkind:
    """Compares with nothing, and cannot be shown."""

    __hash__ = None

    def _refuse(self, *_: object) -> None:
        raise ZeroDivisionError("odd")

    __eq__ = __lt__ = __gt__ = __bool__ = __len__ = __iter__ = __float__ = __index__ = __repr__ = _refuse


ODD = (
    None, True, -1, 0, float("nan"), float("inf"), 10**400, 10**5000, 1j, "", "abc", b"x", (), [], {}, set(), [[[]]],
    [None, [None]], (1, 2, 3), [float("nan")] * 3, [10**400] * 3, object(), object, Unkind(), [Unkind()] * 3,
    torch.empty(0), torch.tensor(1.0), torch.zeros(3, dtype=torch.int64), torch.zeros(2, 0, 3),
    torch.zeros(5, 5, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.complex64), [torch.empty(0)] * 3,
)  # fmt: skip


def _giving(each: Exercise, value: Any) -> Any:
    """An answer that gives this value whatever is asked of it."""

    class Answer:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def __getattr__(self, name: str) -> Callable[..., Any]:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *_, **__: value

    return {"function": lambda *_, **__: value, "class": Answer, "value": value}[each.kind]


@pytest.mark.parametrize("each", everything().values(), ids=lambda each: each.id)
def test_odd_values_are_wrong_and_raise_nothing(each: Exercise) -> None:
    for value in ODD:
        result = evaluate(each.id, _giving(each, value), seed=1)
        assert not result.ok and all(type(row.ok) is bool for row in result.rows)
        assert result_as_text(result) and result_as_html(result)


def _exercise(check: Callable[[Any, random.Random], Verdict]) -> Exercise:
    return exercise("1.1", title="t", minutes=1, needs="f", hints=("a", "b", "c"), mistakes={})(check)


def test_the_row_says_what_came_back_and_why_it_cannot_be_compared() -> None:
    made = _exercise(lambda answer, draw: Verdict((Row("r", float(call(answer, 3, shown="f(3)")) == 1),)))
    with pytest.raises(Stumbled) as stumbled:
        verdict(made, lambda n: 10**400, random.Random())
    seen = stumbled.value.row.seen
    assert seen.startswith("f(3) gave 1000") and "looking at it raised OverflowError: int too large" in seen
    assert isinstance(stumbled.value.__cause__, OverflowError) and len(seen) < 500
    with pytest.raises(Stumbled, match=r"f\(3\) gave a value of the type Unkind that cannot be shown"):
        verdict(made, lambda n: Unkind(), random.Random())


def test_what_came_back_is_not_kept_alive() -> None:
    made = [torch.ones(3)]
    gone = weakref.ref(made[0])
    call(lambda: made.pop(), shown="f()")
    assert gone() is None
    call(lambda: [1, 2], shown="f()")
    assert (latest.shown, latest.text(99)) == ("f()", "a value of the type list")


def test_an_exception_whose_message_cannot_be_shown_is_named() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    def raises(*_: Any) -> None:
        raise Mute

    assert "raised Mute" in evaluate("4.1", raises).rows[0].seen


def test_a_row_that_is_neither_true_nor_false_is_an_odd_answer() -> None:
    made = _exercise(lambda answer, draw: Verdict((Row("r", answer() == torch.ones(2)),)))
    with pytest.raises(Stumbled, match="Boolean value of Tensor"):
        verdict(made, lambda: torch.ones(2), random.Random())
