"""Every exercise of every lab: well formed, its solution passes, its stub says so, each planted answer is caught.

An exercise's cell stands alone: it imports what it uses. That is what makes it checkable here, and by a grader.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from course_lib.lab import CheckFailed, evaluate
from course_lib.lab.model import Exercise, Planted
from course_lib.lab.notebook import learner_notebook, read_solution
from course_lib.lab.registry import everything

EXERCISES = list(everything().values())
PLANTED = [(each, planted) for each in EXERCISES for planted in each.planted]
SEEDS = [pytest.param(range(2), id="few"), pytest.param(range(2, 22), id="many", marks=pytest.mark.slow)]
SOLUTIONS = sorted((Path(__file__).resolve().parents[2] / "solutions").glob("[0-9][0-9]_*.py"))


def cells(solution: Path, learner: bool) -> dict[str, str]:
    """The source of each exercise's cell by exercise number, as the solution has it or as learners get it."""
    notebook = read_solution(solution)
    notebook = learner_notebook(solution, notebook) if learner else notebook
    return {cell.metadata.exercise: cell.source for cell in notebook.cells if "exercise" in cell.metadata}


@pytest.mark.parametrize("each", EXERCISES, ids=lambda each: each.id)
def test_is_well_formed(each: Exercise) -> None:
    assert 0 < each.minutes <= 60
    assert len(each.hints) == 3 and all(len(hint) > 20 for hint in each.hints)
    assert len(each.planted) >= 2
    assert {planted.mistake for planted in each.planted} == set(each.mistakes), "every hint has its planted answer"


@pytest.mark.parametrize(("each", "planted"), PLANTED, ids=lambda value: getattr(value, "id", None) or value.name)
@pytest.mark.parametrize("seeds", SEEDS)
def test_planted_answer_is_rejected_with_its_hint(each: Exercise, planted: Planted, seeds: range) -> None:
    for seed in seeds:
        result = evaluate(each.id, planted.answer(each.needs), seed=seed)
        assert not result.ok
        assert result.mistake == planted.mistake, f"seed {seed}"
        assert result.diagnosis == each.mistakes[planted.mistake]
        assert all(row.expected and row.seen for row in result.rows if not row.ok)


@pytest.mark.parametrize("solution", SOLUTIONS, ids=lambda path: path.stem)
def test_solutions_pass_and_stubs_say_that_they_are_not_written(solution: Path) -> None:
    """An exercise may build on the ones above it: its cell runs after their solutions, and after nothing else."""
    known, above = everything(), ""
    stubs = cells(solution, learner=True)
    for number, source in cells(solution, learner=False).items():
        with pytest.raises(CheckFailed, match=f"exercise {number} is not written yet"):
            evaluate(number, Planted(number, above + stubs[number], "").answer(known[number].needs))
        above += source + "\n\n"
        result = evaluate(number, Planted(number, above, "").answer(known[number].needs), seed=1)
        assert result.ok, [row for row in result.rows if not row.ok]
