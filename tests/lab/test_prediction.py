"""`predict` and `compare`, without a notebook; `test_kernel.py` tries them in one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from course_lib import lab
from course_lib.lab import prediction

ASK = ("4.best_bucket", "Which bucket size is the fastest?")


def test_asking_never_waits_and_saves_nothing(capsys: pytest.CaptureFixture, learner: Path) -> None:
    lab.predict(*ASK, unit="MB")
    assert capsys.readouterr().out == "Which bucket size is the fastest?\nno prediction yet\n"
    assert lab.predictions() == {} and not (learner / "predictions.json").exists()


def test_a_number_is_kept_and_compared(capsys: pytest.CaptureFixture, learner: Path) -> None:
    lab.predict(*ASK, unit="MB", answer=" 6 MB")
    assert "your prediction: 6 MB" in capsys.readouterr().out
    lab.compare("4.best_bucket", 3.0)
    out = capsys.readouterr().out
    assert "you predicted: 6 MB" in out and "measured: 3 MB" in out and "2 times what was measured" in out
    kept = json.loads((learner / "predictions.json").read_text())
    assert kept == {"4.best_bucket": {"question": ASK[1], "unit": "MB", "choices": None, "answer": 6.0,
                                      "found": 3.0, "how": "measured"}}
    assert lab.predictions() == {"4.best_bucket": 6.0}


def test_a_choice_is_kept_and_compared(capsys: pytest.CaptureFixture) -> None:
    lab.predict("4.order", "Which order hides more?", choices=["forward", "reverse"], answer="forward")
    lab.compare("4.order", "reverse")
    assert "your prediction is: another" in capsys.readouterr().out


def test_asking_again_keeps_the_answer(capsys: pytest.CaptureFixture) -> None:
    lab.predict(*ASK, unit="MB", answer=6)
    lab.predict(*ASK, unit="MB")
    assert lab.predictions() == {"4.best_bucket": 6.0}


def test_comparing_without_a_prediction_says_so(capsys: pytest.CaptureFixture) -> None:
    lab.predict(*ASK, unit="MB")
    lab.compare("4.best_bucket", 3)
    assert "you predicted: nothing" in capsys.readouterr().out
    with pytest.raises(lab.LabError, match=r"nothing was asked under '4\.other'"):
        lab.compare("4.other", 3)


@pytest.mark.parametrize(
    ("key", "how", "says"),
    [
        ("best_bucket", {"unit": "MB"}, "should be the lab's number and a name"),
        ("4.a", {}, "give unit= for a number, or choices="),
        ("4.a", {"unit": "MB", "choices": ["x"]}, "and not both"),
        ("4.a", {"unit": "MB", "answer": "many"}, "'many' is not a number of MB"),
        ("4.a", {"unit": "", "answer": "1,000"}, "'1,000' is not a number"),
        ("4.a", {"unit": "MB", "answer": "nan"}, "is not a number"),
        ("4.a", {"choices": ["x", "y"], "answer": "z"}, "'z' is none of the choices: x, y"),
    ],
)
def test_what_cannot_be_asked_or_answered(key: str, how: dict, says: str) -> None:
    with pytest.raises(lab.LabError, match=says):
        lab.predict(key, "q", **how)
    assert lab.predictions() == {}


@pytest.mark.parametrize("choices", [None, ["forward", "reverse"]])
def test_the_save_button(choices: list[str] | None) -> None:
    asked = {"question": "q <b>", "unit": "" if choices else "MB", "choices": choices}
    box = prediction._field("4.a", asked)
    question, row, said = box.children
    field, button = row.children[0], row.children[-1]
    assert "q &lt;b&gt;" in question.value
    button.click()
    assert "Answer first" in said.value and lab.predictions() == {}
    field.value = choices[1] if choices else "4.5"
    button.click()
    assert "Saved:" in said.value and lab.predictions() == {"4.a": choices[1] if choices else 4.5}
    again = prediction._field("4.a", asked)
    assert again.children[1].children[0].value == (choices[1] if choices else "4.5")
    if not choices:
        field.value = "<b>"
        button.click()
        assert "is not a number of MB" in said.value and "&lt;b&gt;" in said.value
        assert lab.predictions() == {"4.a": 4.5}
