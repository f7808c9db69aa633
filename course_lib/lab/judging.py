"""An exercise's check and what it is given: an answer that the check cannot even look at is a wrong one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from course_lib.lab.errors import Told
from course_lib.lab.guard import Broke, in_words, latest
from course_lib.lab.model import Exercise, Row, Verdict

LONGEST_TEXT = 200


class Stumbled(Exception):
    """The check itself raised: its cause is the exception. `row` is the ✘ for it, if the answer is to blame."""

    def __init__(self, row: Row) -> None:
        super().__init__(row.seen)
        self.row = row


def verdict(exercise: Exercise, answer: Any, draw: random.Random) -> Verdict:
    """What the exercise's check says of an answer.

    Raises `Broke` and `NotImplementedError` as the learner's code does (see `guard.call`), `CheckFailed`, and
    `Stumbled` where comparing what the learner's code gave raised: 10**400 is no float, an empty tensor neither true
    nor false.
    """
    latest.forget()
    try:
        found = exercise.check(answer, draw)
        return replace(found, rows=tuple(replace(row, ok=bool(row.ok)) for row in found.rows))
    except (Told, Broke, NotImplementedError):
        raise
    except (Exception, SystemExit) as error:
        raise Stumbled(_row(error)) from error
    finally:
        latest.forget()


def _row(error: BaseException) -> Row:
    said = f"looking at it raised {in_words(error)}"[: 2 * LONGEST_TEXT]
    gave = f"{latest.shown} gave {latest.text(LONGEST_TEXT)}, and " if latest.shown else ""
    return Row("what comes back is of the kind that is asked for", False, "what the text of the exercise says",
               gave + said)  # fmt: skip
