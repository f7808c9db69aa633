"""An answer that a check stumbles over costs its points; a check that stumbles over the solution is the grader's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from course_lib.grade import referee
from course_lib.grade.judge import judge
from course_lib.grade.outcome import Part
from course_lib.grade.template import Submission, Template
from course_lib.lab.model import Row, Verdict
from course_lib.lab.notebook import as_text, read_solution

ROOT = Path(__file__).resolve().parents[2]


def _part(lab: str, number: str, source: str) -> Part:
    template = Template.load(lab, ROOT)
    changed = Submission(template.solution | {number: source}, ())
    return referee.judge_exercise(template, changed, template.exercises[number], seed=1)


@pytest.mark.parametrize(("number", "source", "said"), [
    ("1.3", "def bytes_per_update(*_):\n    return 10**400", "gave 1000"),
    pytest.param("1.1", "import torch\ndef accumulation_steps(*_):\n    return torch.empty(0)", "gave tensor([])",
                 marks=pytest.mark.slow),
    pytest.param("6.2", "def step_time(*_):\n    return 10**400", "gave 1000", marks=pytest.mark.slow),
    pytest.param("11.3", "import torch\ndef gather_matmul(*_):\n    return torch.empty(0)", "raised",
                 marks=pytest.mark.slow)])  # fmt: skip
def test_an_odd_answer_is_a_failed_check(number: str, source: str, said: str) -> None:
    part = _part(number.partition(".")[0], number, source)
    assert (part.outcome, part.points) == ("failed_checks", 0.0), part
    assert said in part.rows[0].seen


def test_leaving_while_a_check_looks_at_the_answer_is_leaving() -> None:
    template = Template.load("1", ROOT)
    looks = replace(template.exercises["1.3"], check=lambda answer, _: Verdict((Row("r", list(answer()) == []),)))
    source = "def bytes_per_update():\n    yield 1\n    raise SystemExit"
    part = referee.judge_exercise(template, Submission({"1.3": source}, ()), looks, seed=1)
    assert (part.outcome, part.points) == ("early_exit", 0.0), part


def _broken(answer: object, draw: object) -> Verdict:
    raise OverflowError("a fault of the check")


@pytest.mark.parametrize("of_the_solution", [True, False])
def test_a_check_that_raises_over_the_solution_too_is_the_graders_fault(of_the_solution: bool) -> None:
    template = Template.load("1", ROOT)
    broken = replace(template.exercises["1.3"], check=_broken)
    template = replace(template, exercises=template.exercises | {"1.3": broken})
    notebook = read_solution(ROOT / "solutions" / "01_why_accumulate.py")
    for cell in notebook.cells:
        if cell.metadata.get("exercise") == "1.3" and not of_the_solution:
            cell.source = "def bytes_per_update(*_):\n    return 0"
    found = judge("a", as_text(notebook).encode(), template, seed=1, notebook=False).judgement
    assert (found.status, found.points) == ("grader_error", None)
    assert "a fault of the check" in found.note
