"""One submission from its bytes to a judgement. Whatever happens in it stays in it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from course_lib.grade import measure, referee, sandbox
from course_lib.grade.outcome import Judgement, Part, worst
from course_lib.grade.quiet import Quiet
from course_lib.grade.template import Submission, Template, Unreadable, read_submission

if TYPE_CHECKING:
    from nbformat import NotebookNode

    from course_lib.grade.engine import Run
    from course_lib.grade.measure import Measurement


@dataclass(frozen=True)
class Judged:
    """The judgement, and what is kept beside it: the measurement, the executed notebook and its log."""

    judgement: Judgement
    measurement: Measurement | None = None
    notebook: NotebookNode | None = None
    log: bytes = b""
    trouble: str = field(default="", repr=False)


def judge(identity: str, data: bytes, template: Template, seed: int, *, notebook: bool = True,
          quiet: Quiet | None = None, fault: str = "", flags: tuple[str, ...] = ()) -> Judged:  # fmt: skip
    """Judge a submission. Never raises for what the submission does; a fault of the grader is a `grader_error`.

    `fault` says why there are no data, `flags` are remarks about how they were found. `quiet` keeps other judgements
    of the batch off the machine while this one measures.
    """
    begin = time.monotonic()
    try:
        if fault:
            raise Unreadable(f"Nothing to judge: {fault}.")
        found = read_submission(data, template)
        submission = replace(found, flags=flags + found.flags)
        if not submission.sources:
            known = ", ".join(template.cells())
            return _refused(identity, template, "template_mismatch",
                            f"None of the exercise cells ({known}) of lab {template.lab} is in this notebook.", begin)
    except Unreadable as unreadable:
        return _refused(identity, template, "unreadable", str(unreadable), begin)
    except Exception as error:
        return _failed(identity, template, error, begin)
    return _judged(identity, submission, template, seed, notebook, begin, quiet or Quiet(None))


def _judged(identity: str, submission: Submission, template: Template, seed: int, notebook: bool,
            begin: float, quiet: Quiet) -> Judged:  # fmt: skip
    from course_lib.grade import engine

    parts: list[Part] = []
    measurement, run, trouble = None, None, ""
    try:
        with quiet.together():
            parts = referee.judge(template, submission, seed)
        with quiet.alone():
            measured = measure.judge(template, submission, parts, seed)
        if measured is not None:
            parts.append(measured.part)
            measurement = measured.measurement
    except Exception as error:
        return _failed(identity, template, error, begin, parts)
    if notebook:
        try:
            with quiet.together():
                run = engine.run(template, submission, failed=[part.id for part in parts if part.outcome != "ok"])
        except Exception as error:  # evidence is missing then, but everything is judged
            trouble = "".join(traceback.format_exception(error))
    status = worst([*(part.outcome for part in parts), *([run.outcome] if run else [])])
    facts = {"seed": seed, **(measurement.facts if measurement else {}), **(run.facts if run else {})}
    judgement = Judgement(
        identity, template.lab, tuple(parts), status, _note(parts, run), sandbox.level(),
        overlap=measurement.overlap if measurement else None,
        fair_score=measurement.fair_score if measurement else None,
        seconds=time.monotonic() - begin, flags=submission.flags, facts=facts,
    )  # fmt: skip
    return Judged(judgement, measurement, run.notebook if run else None, run.log if run else b"", trouble)


def _note(parts: list[Part], run: Run | None) -> str:
    """The most telling sentence: of the part, or of the notebook's run, that gave the submission its status."""
    said = [(part.outcome, f"{part.id}: {part.sentence}") for part in parts if part.outcome != "ok"]
    if run is not None and run.outcome != "ok":
        said.append((run.outcome, run.sentence))
    status = worst(outcome for outcome, _ in said)
    return next((sentence for outcome, sentence in said if outcome == status), "")


def unjudged(template: Template, outcome: str, points: float | None, but: Collection[str] = ()) -> list[Part]:
    """A part with this outcome for all that a submission could have earned, but for those already judged."""
    titles = {number: each.title for number, each in template.exercises.items() if number in template.cells()}
    if measure.applies(template):
        titles[measure.MEASURED] = measure.TITLE
    left = [(number, title) for number, title in titles.items() if number not in but]
    return [Part(number, title, outcome, points, referee.POINTS) for number, title in left]


def _refused(identity: str, template: Template, outcome: str, sentence: str, begin: float) -> Judged:
    parts = tuple(unjudged(template, outcome, 0.0))
    return Judged(Judgement(identity, template.lab, parts, outcome, sentence, sandbox.level(),
                            seconds=time.monotonic() - begin))  # fmt: skip


def _failed(identity: str, template: Template, error: Exception, begin: float, parts: Collection[Part] = ()) -> Judged:
    """The grader's own fault: points are blank for what was not judged, and a person is called."""
    missing = unjudged(template, "grader_error", None, [part.id for part in parts])
    note = f"The grader failed ({type(error).__name__}: {error}); nothing is held against this submission."
    judgement = Judgement(identity, template.lab, (*parts, *missing), "grader_error", note[:500], sandbox.level(),
                          seconds=time.monotonic() - begin)  # fmt: skip
    return Judged(judgement, trouble="".join(traceback.format_exception(error)))
