"""Exercises whose check needs autograd: forward and backward run in the sandbox, values are judged outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from course_lib.grade import referee
from course_lib.grade.template import Submission, Template
from course_lib.lab.guard import on_its_side
from course_lib.lab.notebook import read_solution

ROOT = Path(__file__).resolve().parents[2]
PLANTED = [("11.1", "partial_input_gradient"), ("11.1", "bias_divided"), ("11.2", "norm_forgotten"),
           ("11.3", "waits_each_chunk")]  # fmt: skip


@pytest.fixture(scope="module")
def lab() -> tuple[Template, dict[str, str]]:
    cells = read_solution(ROOT / "solutions" / "11_tensor_parallel.py").cells
    return Template.load("11", ROOT), {c.metadata.exercise: c.source for c in cells if "exercise" in c.metadata}


@pytest.mark.slow
@pytest.mark.parametrize("number", ["11.1", "11.2", "11.3"])
def test_the_solution_has_full_points(lab, number: str) -> None:
    template, sources = lab
    part = referee.judge_exercise(template, Submission(sources, ()), template.exercises[number], seed=1)
    assert part.outcome == "ok" and part.points == part.max_points, part


@pytest.mark.slow
@pytest.mark.parametrize(("number", "mistake"), PLANTED)
def test_a_wrong_answer_gets_its_hint(lab, number: str, mistake: str) -> None:
    template, sources = lab
    exercise = template.exercises[number]
    planted = next(each for each in exercise.planted if each.name == mistake)
    part = referee.judge_exercise(template, Submission(sources | {number: planted.source}, ()), exercise, seed=1)
    assert part.outcome == "failed_checks" and part.hint == exercise.mistakes[mistake], part


@pytest.mark.slow
def test_what_the_code_raises_is_told_as_elsewhere(lab) -> None:
    template, sources = lab
    broken = "def parallel_mlp(x, p, wire):\n    return x / 0 + [][1]\n"
    part = referee.judge_exercise(template, Submission(sources | {"11.1": broken}, ()), template.exercises["11.1"], 1)
    assert part.outcome == "failed_checks" and "on rank 0 of 2 raised IndexError" in part.sentence, part


def test_without_a_grader_the_function_is_called_here() -> None:
    assert on_its_side(lambda answer, x: answer(x) + 1, lambda x: 2 * x, 3) == 7
