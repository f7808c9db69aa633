"""`course status` as a table of 80 columns."""

from __future__ import annotations

from datetime import datetime
from typing import IO

from rich.markup import escape
from rich.table import Table

from course_lib.lab.status import ExerciseStatus, LabStatus, Status
from course_lib.terminal import console

NOTHING = ("There are no lab notebooks and no records of progress in {folder}. Go to the folder with your labs, or "
           "name it: course status FOLDER. Records appear once the first cell of a lab has run.")
NO_RECORDS = "No records of progress yet: they appear in .course/ beside the notebooks when you run a lab's first cell."


def nothing(found: Status) -> str:
    """Why there is nothing to show."""
    if found.unreadable:
        return (f"Nothing in {found.folder} can be read. Damaged: {', '.join(found.unreadable)}. Save it again from "
                "JupyterLab, or copy it afresh from the course.")
    return NOTHING.format(folder=found.folder)


def as_text(found: Status, file: IO[str]) -> None:
    """Write the table and what comes next. Without a terminal it is plain text of 80 columns."""
    out = console(file)
    for path in found.unreadable:
        out.print(f"[bold red]Not readable:[/] {escape(path)}. What it held is not counted.")
    if not found.found:
        out.print(NOTHING.format(folder=escape(found.folder)))
        return
    out.print(_table(found.labs))
    out.print(escape(_closing(found)))


def _table(labs: tuple[LabStatus, ...]) -> Table:
    table = Table(box=None, expand=True, padding=(0, 1), header_style="bold")
    table.add_column("lab", ratio=1)
    for name in ("passed", "tried", "hints", "predicted", "cells run"):
        table.add_column(name, justify="right")
    table.add_column("last touched", width=12)
    for lab in labs:
        total = len(lab.exercises)
        table.add_row(escape(f"{lab.number} {lab.title}"), _of(lab.passed, total), _of(lab.attempted, total),
                      str(lab.hints), _of(lab.predictions, lab.questions), _of(lab.cells_run, lab.cells),
                      _day(lab.last_touched))
    return table


def _closing(found: Status) -> str:
    if not found.records:
        return NO_RECORDS
    upcoming = next_exercise(found)
    if upcoming is None:
        return "Every exercise of these labs is passed."
    return f"Next: exercise {upcoming.number}" + (f", {upcoming.title}." if upcoming.title else ".")


def next_exercise(found: Status) -> ExerciseStatus | None:
    """The first that is not passed, in the lab touched last; then in the others in order."""
    labs = sorted(found.labs, key=lambda lab: lab.number)
    labs.sort(key=lambda lab: lab.last_touched, reverse=True)
    return next((each for lab in labs for each in lab.exercises if not each.passed), None)


def _of(part: int, whole: int) -> str:
    return f"{part}/{whole}" if whole else "–"


def _day(moment: str) -> str:
    """The local date of a UTC time."""
    try:
        return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d")
    except ValueError:
        return "–"
