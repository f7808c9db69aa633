"""`course grade --self-check`: the grader judged. Solution = full marks, stub = 0, every planted answer rejected."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

from course_lib.grade import referee
from course_lib.grade.judge import judge
from course_lib.grade.outcome import Part
from course_lib.grade.template import Submission, Template
from course_lib.lab.notebook import as_text, learner_notebook, read_solution


def self_check(root: Path, lab: str, *, jobs: int = 1, seed: int | None = None) -> int:
    """Print a line for each trial. Returns 0 if all came out as they must, else 4. Raises `FileNotFoundError` where
    there are no solutions."""
    path = next(iter(sorted((root / "solutions").glob(f"{lab.zfill(2)}_*.py"))), None)
    if path is None:
        raise FileNotFoundError(f"--self-check needs the instructor's tree: {root} has no solution of lab {lab}")
    seed = secrets.randbelow(2**31) if seed is None else seed
    template, full = Template.load(lab, root), read_solution(path)
    good = True
    for name, notebook, wanted in (("solution", full, "ok"), ("stub", learner_notebook(path, full), "stub_left")):
        judgement = judge(name, as_text(notebook).encode(), template, seed, notebook=False).judgement
        points = judgement.max_points if wanted == "ok" else 0
        right = judgement.status == wanted and judgement.points == points
        good &= _say(right, name, f"{judgement.status}, {judgement.points} of {judgement.max_points} points",
                     judgement.note)  # fmt: skip
    sources = {cell.metadata.exercise: cell.source for cell in full.cells if "exercise" in cell.metadata}
    for name, part, hint in _planted(template, sources, seed):
        good &= _say(part.outcome == "failed_checks" and part.hint == hint, name, part.outcome, part.sentence)
    return 0 if good else 4


def _planted(template: Template, sources: dict[str, str], seed: int) -> Iterator[tuple[str, Part, str]]:
    """Every planted wrong answer, with the part that it got and the hint that was written for it."""
    for number, exercise in template.exercises.items():
        for planted in exercise.planted if number in sources else ():
            submission = Submission(sources | {number: planted.source}, ())
            part = referee.judge_exercise(template, submission, exercise, seed)
            yield f"{number} {planted.name}", part, exercise.mistakes[planted.mistake]


def _say(right: bool, name: str, what: str, why: str) -> bool:
    print(f"{'✔' if right else '✘'} {name}: {what}" + ("" if right else f". {why}"), flush=True)
    return right
