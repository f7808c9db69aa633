"""The hidden checks: each exercise in a fresh sandbox, its check function here, on inputs drawn for this run."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Mapping

from course_lib.grade import sandbox
from course_lib.grade.channel import BadMessage, Gone, Late
from course_lib.grade.outcome import Part
from course_lib.grade.session import START_SECONDS, Flooded, Session
from course_lib.grade.stand_in import StandIn
from course_lib.grade.template import Submission, Template, stub_line
from course_lib.lab.errors import CheckFailed
from course_lib.lab.guard import Broke
from course_lib.lab.judging import Stumbled, verdict
from course_lib.lab.model import Exercise, Row, Verdict

POINTS = 10.0
CELL_SECONDS = 20.0
CHECK_SECONDS = 60.0
LONGEST_TEXT = 4000
"""Of what a row of a check shows: an answer can have millions of numbers."""

_SENTENCES = {
    "timeout": "It was still running after {seconds:.0f} s.",
    "kernel_died": "It ended the process it ran in (exit code {code}).",
    "early_exit": "It left the process by itself: sys.exit() and os._exit() do not belong into a solution.",
    "out_of_memory": "It asked for more than {memory} MB of memory.",
    "output_flood": "It printed more than {output} MB.",
}


class Stopped(Exception):
    """The sandbox ended, or was ended, before there was an answer. `outcome` names how."""

    def __init__(self, outcome: str, sentence: str) -> None:
        super().__init__(sentence)
        self.outcome = outcome


def judge(template: Template, submission: Submission, seed: int) -> list[Part]:
    """One part for each exercise of the lab, in order.

    A cell that ends its process, or never ends, keeps the exercises after it from being reached; those before it
    keep their points.
    """
    parts: list[Part] = []
    broken: Part | None = None
    for number, exercise in template.exercises.items():
        if number not in template.cells():
            continue
        if broken is not None:
            sentence = f"Not reached: the cell of exercise {broken.id} stopped the notebook. {broken.sentence}"
            parts.append(Part(number, exercise.title, broken.outcome, 0.0, POINTS, sentence))
            continue
        try:
            part, stops = judge_exercise(template, submission, exercise, seed), False
        except CellStopped as stopped:
            part, stops = stopped.part, True
        parts.append(part)
        broken = part if stops else None
    return parts


class CellStopped(Exception):
    """Running the cell itself stopped the sandbox, so nothing after it can be reached."""

    def __init__(self, part: Part) -> None:
        super().__init__(part.id)
        self.part = part


def judge_exercise(template: Template, submission: Submission, exercise: Exercise, seed: int) -> Part:
    """Judge one exercise in a fresh sandbox. Raises `CellStopped` if a cell on the way to it ends or never ends."""
    number, source = exercise.id, submission.sources.get(exercise.id)
    if source is None:
        return _part(exercise, "template_mismatch", f"The cell of exercise {number} is missing.")
    if source.strip() == template.cells()[number].source.strip():
        return _part(exercise, "stub_left", f"Exercise {number} is not written yet.")
    line = stub_line(source)
    with Session() as session:
        cell_error = _load(template, submission, exercise, session)
        if line and cell_error.startswith("The cell raised NotImplementedError"):
            return _part(exercise, "stub_left", f"`raise NotImplementedError` was left in line {line} of the cell.")
        try:
            answer = session.fetch(exercise.needs)
            return _checked(exercise, answer, seed, session)
        except Stumbled as stumbled:
            if session.raised & {"SystemExit", "MemoryError"}:
                return _part(exercise, *_how_it_broke(session, ""))
            _require_a_sound_check(template, submission, exercise, seed, stumbled)
            return _from(exercise, Verdict((stumbled.row,)))
        except NameError:
            return _part(exercise, "failed_checks", cell_error or f"The cell does not define `{exercise.needs}`.")
        except Broke as broke:
            return _part(exercise, *_how_it_broke(session, str(broke)))
        except NotImplementedError:
            where = f" `raise NotImplementedError` was left in line {line} of the cell." if line else ""
            return _part(exercise, "stub_left", f"Exercise {number} is not written yet.{where}")
        except CheckFailed as failed:
            return _part(exercise, "failed_checks", str(failed))
        except (Gone, Late, Flooded) as stop:
            outcome, sentence = stopped_by(stop, session, CHECK_SECONDS)
            return _part(exercise, outcome, f"While exercise {number} was checked: {sentence}")
        except BadMessage as bad:
            return _part(exercise, "failed_checks", f"`{exercise.needs}` gave something that is no answer: {bad}.")


def _load(template: Template, submission: Submission, exercise: Exercise, session: Session) -> str:
    """Run the cells up to this exercise. What its own cell raised, in words; earlier cells may fail in peace."""
    numbers = list(submission.sources)
    wanted = [n for n in numbers if numbers.index(n) <= numbers.index(exercise.id)]
    try:
        session.allow(START_SECONDS)
        for line in template.prelude(submission.sources[n] for n in wanted):
            with contextlib.suppress(Exception):  # a name that is missing then is told where it is used
                session.cell("<imports>", line)
    except (Gone, Late, Flooded) as stop:
        raise RuntimeError(f"the sandbox did not start: {session.box.output.decode(errors='replace')}") from stop
    said = ""
    for number in wanted:
        session.allow(CELL_SECONDS)
        try:
            session.cell(f"<exercise {number}>", submission.sources[number])
        except SystemExit:
            sentence = _SENTENCES["early_exit"]
            raise CellStopped(_part(template.exercises[number], "early_exit", sentence)) from None
        except Exception as error:
            place = getattr(error, "learner_place", "")
            said = f"The cell raised {type(error).__name__}: {error}{place}."
            if isinstance(error, MemoryError):
                said = "The cell asked for more memory than there is."
        except (Gone, Late, Flooded) as stop:
            part = _part(template.exercises[number], *stopped_by(stop, session, CELL_SECONDS))
            raise CellStopped(part) from None
        else:
            said = ""
    return said


def _checked(exercise: Exercise, answer: object, seed: int, session: Session) -> Part:
    """Run the check function here, against the stand-in."""
    if exercise.kind != "value" and not (isinstance(answer, StandIn) and answer.kind == exercise.kind):
        return _part(exercise, "failed_checks", f"`{exercise.needs}` is not a {exercise.kind}.")
    session.allow(CHECK_SECONDS)
    return _from(exercise, verdict(exercise, answer, random.Random(f"{exercise.id}/{seed}")))


def _require_a_sound_check(template: Template, submission: Submission, exercise: Exercise, seed: int,
                           stumbled: Stumbled) -> None:  # fmt: skip
    """Raises `RuntimeError` if the check does not pass the instructor's own solution on the same inputs: then it is the
    check that is at fault, and not what it was given."""
    if not (own := template.solution.get(exercise.id)):
        return
    sound = submission.sources[exercise.id] != own
    if sound:
        try:
            sound = judge_exercise(template, Submission(template.solution, ()), exercise, seed).outcome == "ok"
        except CellStopped:
            sound = False
    if not sound:
        raise RuntimeError(f"the check of exercise {exercise.id} fails with the solution: {stumbled}") from stumbled


def _from(exercise: Exercise, found: Verdict) -> Part:
    rows = tuple(Row(row.name, row.ok, row.expected[:LONGEST_TEXT], row.seen[:LONGEST_TEXT]) for row in found.rows)
    if rows and all(row.ok for row in rows):
        return Part(exercise.id, exercise.title, "ok", POINTS, POINTS, rows=rows)
    hint = exercise.mistakes.get(found.mistake, "")
    sentence = f"{sum(not row.ok for row in rows)} of {len(rows)} checks failed."
    return _part(exercise, "failed_checks", sentence, hint, rows)


def _how_it_broke(session: Session, said: str) -> tuple[str, str]:
    """Outcome and sentence for an exception of the learner's code during the check."""
    if "SystemExit" in session.raised:
        return "early_exit", _SENTENCES["early_exit"]
    if "MemoryError" in session.raised:
        return "out_of_memory", _SENTENCES["out_of_memory"].format(memory=session.box.limits.memory_mb)
    return "failed_checks", said


def stopped_by(stop: BaseException, session: Session, seconds: float) -> tuple[str, str]:
    """Outcome and sentence for a sandbox that did not answer."""
    limits = session.box.limits
    if isinstance(stop, Flooded) or session.box.flooded:
        return "output_flood", _SENTENCES["output_flood"].format(output=limits.output_bytes >> 20)
    if isinstance(stop, Late):
        return "timeout", _SENTENCES["timeout"].format(seconds=seconds)
    code = _exit_code(session.box)
    if code in (0, 1):
        return "early_exit", _SENTENCES["early_exit"]
    if code == sandbox.jail.SETUP_FAILED:
        raise RuntimeError(f"the sandbox did not start: {session.box.output.decode(errors='replace')}")
    return "kernel_died", _SENTENCES["kernel_died"].format(code=code)


def _exit_code(box: sandbox.Box) -> int | None:
    for _ in range(100):
        if (code := box.process.poll()) is not None:
            return code
        time.sleep(0.02)
    return None


def _part(exercise: Exercise, outcome: str, sentence: str, hint: str = "", rows: tuple[Row, ...] = ()) -> Part:
    return Part(exercise.id, exercise.title, outcome, 0.0, POINTS, sentence, hint, rows)


def by_number(parts: list[Part]) -> Mapping[str, Part]:
    return {part.id: part for part in parts}
