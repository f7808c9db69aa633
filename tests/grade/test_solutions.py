"""Every exercise of every lab, judged in the sandbox with its solution."""

from __future__ import annotations

from pathlib import Path

import pytest

from course_lib.grade import referee
from course_lib.grade.template import Submission, Template
from course_lib.lab.notebook import read_solution

ROOT = Path(__file__).resolve().parents[2]
SOLUTIONS = {path.name[:2]: path for path in sorted((ROOT / "solutions").glob("[0-9][0-9]_*.py"))}
QUICK = {"00", "01", "05", "10", "13"}
"""Labs whose checks need no tensors: torch alone takes seconds to load, in each sandbox anew."""


@pytest.mark.parametrize("lab", [pytest.param(lab, marks=() if lab in QUICK else pytest.mark.slow)
                                 for lab in SOLUTIONS])  # fmt: skip
def test_the_solution_of_every_exercise_is_ok(lab: str) -> None:
    template = Template.load(lab, ROOT)
    sources = {c.metadata.exercise: c.source for c in read_solution(SOLUTIONS[lab]).cells if "exercise" in c.metadata}
    assert set(sources) == set(template.cells())
    for number, exercise in template.exercises.items():
        if number in sources:
            part = referee.judge_exercise(template, Submission(dict(sources), ()), exercise, seed=1)
            assert (part.outcome, part.points) == ("ok", part.max_points), part
