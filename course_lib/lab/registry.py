"""Finding exercises by their number: "4.1" lives in `course_lib.lab.exercises.lab04`."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

from course_lib.lab import exercises
from course_lib.lab.errors import LabError
from course_lib.lab.model import Exercise


def find(number: str) -> Exercise:
    """The exercise with this number. Raises `LabError` that lists the known ones."""
    known = of_lab(chapter) if isinstance(number, str) and (chapter := number.partition(".")[0]).isdigit() else {}
    if number in known:
        return known[number]
    names = ", ".join(f"{each.id} ({each.title})" for each in (known or everything()).values())
    raise LabError(f"There is no exercise {number!r}. The known ones are: {names}.")


def of_lab(chapter: str) -> dict[str, Exercise]:
    """All exercises of one lab by number, in order. A lab without exercises, or without a module, has none."""
    name = f"{exercises.__name__}.lab{chapter.zfill(2)}"
    if importlib.util.find_spec(name) is None:
        return {}
    found = [value for value in vars(importlib.import_module(name)).values() if isinstance(value, Exercise)]
    return {each.id: each for each in sorted(found, key=lambda each: int(each.id.partition(".")[2]))}


def everything() -> dict[str, Exercise]:
    """All exercises of all labs by number, in order."""
    labs = sorted(m.name for m in pkgutil.iter_modules(exercises.__path__) if m.name.startswith("lab"))
    return {number: each for lab in labs for number, each in of_lab(lab.removeprefix("lab")).items()}
