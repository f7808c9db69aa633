"""`check("4.1", assign_buckets)`: the table of ✔ and ✘ under an exercise."""

from __future__ import annotations

import random
import secrets
from typing import Any

from course_lib.lab import record, registry
from course_lib.lab.errors import CheckFailed
from course_lib.lab.guard import Broke, TookTooLong, time_limit
from course_lib.lab.judging import Stumbled
from course_lib.lab.judging import verdict as verdict_of
from course_lib.lab.model import CheckResult, Exercise, Row, Verdict
from course_lib.lab.present import result_as_html, result_as_text, show

SECONDS = 20.0
_NOTHING = object()


def check(number: str, answer: Any = _NOTHING, *, seed: int | None = None) -> None:
    """Check what you wrote for an exercise, and show a table of what was expected and seen.

    The cases are drawn anew each time; pass the `seed` that the table shows to see the same ones again.
    Raises `LabError` for an unknown exercise and `CheckFailed`, in one line, when a row failed or the
    exercise is not written yet: a notebook run by papermill stops there.
    """
    result = evaluate(number, answer, seed=seed)
    record.note_attempt(number, result.ok)
    show(result_as_html(result), result_as_text(result))
    if not result.ok:
        failed = sum(not row.ok for row in result.rows)
        raise CheckFailed(f"✘ exercise {number}: {failed} of {len(result.rows)} rows failed, see the table above.")


def evaluate(number: str, answer: Any = _NOTHING, *, seed: int | None = None) -> CheckResult:
    """The result of a check as data: nothing is shown or remembered, and a failed row is no exception.

    Raises `LabError` for an unknown exercise and `CheckFailed` when there is nothing to check yet.
    """
    exercise = registry.find(number)
    _require_an_answer(exercise, answer)
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    try:
        with time_limit(SECONDS):
            verdict = verdict_of(exercise, answer, random.Random(f"{number}/{seed}"))
    except NotImplementedError:
        raise CheckFailed(
            f"exercise {number} is not written yet: replace the line `raise NotImplementedError(…)` in its cell, "
            "run that cell, then run this one again."
        ) from None
    except Broke as broke:
        verdict = Verdict((Row("your code runs without an exception", False, "a result", str(broke)),))
    except Stumbled as stumbled:
        verdict = Verdict((stumbled.row,))
    except TookTooLong:
        verdict = Verdict((Row("your code comes to an end", False, f"within {SECONDS:.0f} s", "it was still running"),))
    result = CheckResult(number, exercise.title, verdict.rows, seed, verdict.mistake)
    if result.ok:
        return result
    general = f'Take the first ✘ row and work its case by hand. hint("{number}") has three steps for you.'
    diagnosis = exercise.mistakes.get(verdict.mistake, general)
    return CheckResult(number, exercise.title, verdict.rows, seed, verdict.mistake, diagnosis)


def _require_an_answer(exercise: Exercise, answer: Any) -> None:
    usage = f'check("{exercise.id}", {exercise.needs})'
    if answer is _NOTHING:
        raise CheckFailed(f"Pass what you wrote in exercise {exercise.id}: {usage}")
    if exercise.kind == "function" and not callable(answer):
        raise CheckFailed(f"Pass the function itself, without calling it: {usage}. This was a {type(answer).__name__}.")
    if exercise.kind == "class" and not isinstance(answer, type):
        raise CheckFailed(f"Pass the class itself: {usage}. This was a {type(answer).__name__}.")
