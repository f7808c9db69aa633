"""The few nouns of an exercise: what it asks, what a check saw, and the mistakes that it knows.

An exercise is a check function with the decorator `exercise` on it, in
`course_lib/lab/exercises/labNN/`. The check gets what the learner wrote and a source of chance, and
returns its rows; when it recognises a mistake it names it, and the hint written for that mistake is shown.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Kind = Literal["function", "class", "value"]


@dataclass(frozen=True)
class Row:
    """One line of a check's table. `expected` and `seen` are short texts."""

    name: str
    ok: bool
    expected: str = ""
    seen: str = ""


@dataclass(frozen=True)
class Verdict:
    """What a check function returns: its rows, and the key of the mistake it recognised, if any."""

    rows: tuple[Row, ...]
    mistake: str = ""


@dataclass(frozen=True)
class CheckResult:
    """A verdict as it is shown: with the exercise, the seed of its cases, and the hint for the mistake."""

    exercise: str
    title: str
    rows: tuple[Row, ...]
    seed: int
    mistake: str = ""
    diagnosis: str = ""

    @property
    def ok(self) -> bool:
        """Whether every row passed. A check without rows has proved nothing."""
        return bool(self.rows) and all(row.ok for row in self.rows)


@dataclass(frozen=True)
class Planted:
    """A wrong solution that people really write: the source of the exercise's cell.

    The check must reject it with the hint of `mistake`.
    """

    name: str
    source: str
    mistake: str

    def answer(self, needs: str) -> Any:
        """What running the cell leaves under the name `needs`."""
        namespace: dict[str, Any] = {"__name__": "planted"}
        exec(compile(self.source, f"<planted {self.name}>", "exec"), namespace)
        return namespace[needs]


@dataclass(frozen=True)
class Exercise:
    """An exercise. `needs` is the name that the learner's cell defines, `kind` what it must be.

    `mistakes` maps a key to the hint for it.
    """

    id: str
    title: str
    minutes: int
    needs: str
    hints: tuple[str, str, str]
    mistakes: Mapping[str, str]
    check: Callable[[Any, random.Random], Verdict]
    folder: Path = field(repr=False)
    kind: Kind = "function"

    @property
    def planted(self) -> tuple[Planted, ...]:
        """The planted wrong solutions: the files `planted/<id>/<mistake>.py` beside the check.

        A second one for the same mistake is called `<mistake>--anything.py`. There are none in a tree made
        for learners.
        """
        files = sorted((self.folder / "planted" / self.id).glob("*.py"))
        return tuple(Planted(f.stem, f.read_text(encoding="utf-8"), f.stem.split("--")[0]) for f in files)


def exercise(
    id: str,
    *,
    title: str,
    minutes: int,
    needs: str,
    hints: tuple[str, str, str],
    mistakes: Mapping[str, str],
    kind: Kind = "function",
) -> Callable[[Callable[[Any, random.Random], Verdict]], Exercise]:
    """Make an `Exercise` of the check function below. Raises `ValueError` unless there are three hints."""
    if len(hints) != 3:
        raise ValueError(f"exercise {id} has {len(hints)} hints; it needs three steps")

    def decorate(check: Callable[[Any, random.Random], Verdict]) -> Exercise:
        folder = Path(check.__code__.co_filename).parent
        return Exercise(id, title, minutes, needs, hints, mistakes, check, folder, kind)

    return decorate
