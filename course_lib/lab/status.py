"""Where a learner stands: `course status`. It reads `.course/` and the notebooks beside it, and changes neither."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from course_lib.lab import registry

FORMAT = 1
NOTEBOOKS = "[0-9][0-9]_*.ipynb"
_ASKED = re.compile(r"""\bpredict\(\s*["'](\d{1,2}\.[a-z0-9_]+)["']""")


class NoSuchFolder(ValueError):
    """The folder that was named does not exist."""


@dataclass(frozen=True)
class ExerciseStatus:
    """One exercise. `hints` counts how many were revealed; times are UTC, empty where there is none."""

    number: str
    title: str
    attempts: int = 0
    passed: bool = False
    hints: int = 0
    first_passed: str = ""
    last_tried: str = ""


@dataclass(frozen=True)
class LabStatus:
    """One lab. `cells_run` of `cells` code cells have been executed in the notebook as it was last saved."""

    number: str
    title: str
    notebook: str
    exercises: tuple[ExerciseStatus, ...]
    predictions: int
    questions: int
    cells_run: int
    cells: int
    last_touched: str

    @property
    def passed(self) -> int:
        return sum(each.passed for each in self.exercises)

    @property
    def attempted(self) -> int:
        return sum(each.attempts > 0 for each in self.exercises)

    @property
    def hints(self) -> int:
        return sum(each.hints for each in self.exercises)


@dataclass(frozen=True)
class Status:
    """All labs of a folder, the record files that were read, and the records and notebooks that could not be."""

    folder: str
    records: tuple[str, ...]
    unreadable: tuple[str, ...]
    labs: tuple[LabStatus, ...]

    @property
    def found(self) -> bool:
        """Whether there was anything to report: a notebook or a record."""
        return bool(self.labs)

    def as_json(self) -> dict[str, Any]:
        """Plain values with stable keys; `format` grows when a key changes its meaning."""
        counts = ("passed", "attempted", "hints")
        labs = [asdict(lab) | {name: getattr(lab, name) for name in counts} for lab in self.labs]
        return {"format": FORMAT, **asdict(self), "found": self.found, "labs": labs}


@dataclass(frozen=True)
class _Notebook:
    path: Path
    title: str
    questions: frozenset[str]
    cells_run: int
    cells: int
    saved: str


def status(folder: Path | None = None) -> Status:
    """Look into `folder` (the working directory if not given) and the `labs/` in it.

    Where no folder is given, the records are those of COURSE_DIR if that is set, as in the labs. Raises
    `NoSuchFolder`. Files that cannot be read are listed and otherwise treated as missing.
    """
    root = Path.cwd() if folder is None else folder
    if not root.is_dir():
        raise NoSuchFolder(f"there is no folder {root}: name the one with your lab notebooks")
    places = [place for place in (root, root / "labs") if place.is_dir()]
    own = os.environ.get("COURSE_DIR") if folder is None else None
    stores = [Path(own)] if own else [root] if root.name == ".course" else [place / ".course" for place in places]
    progress, first, bad = _records(stores, "progress")
    predictions, second, worse = _records(stores, "predictions")
    notebooks, broken = _notebooks(places)
    numbers = sorted({_lab_of(key) for key in (*progress, *predictions)} - {""} | set(notebooks))
    labs = tuple(_lab(number, notebooks.get(number), progress, predictions) for number in numbers)
    return Status(str(root), (*first, *second), (*bad, *worse, *broken), labs)


def _records(stores: Iterable[Path], name: str) -> tuple[dict[str, dict], tuple[str, ...], tuple[str, ...]]:
    """The merged records, the files that held them, and the files that could not be read."""
    merged: dict[str, dict] = {}
    read, unreadable = [], []
    for path in (store / f"{name}.json" for store in stores):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, RecursionError):
            unreadable.append(str(path))
            continue
        if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
            unreadable.append(str(path))
            continue
        read.append(str(path))
        for key, entry in found.items():
            merged[key] = _merge(merged.get(key, {}), entry)
    return merged, tuple(read), tuple(unreadable)


def _merge(one: dict, other: dict) -> dict:
    """Two folders' records of one exercise: attempts add up, what was reached once stays reached."""
    first = sorted(filter(None, (_text(one, "first_passed"), _text(other, "first_passed"))))
    return one | other | {
        "attempts": _count(one, "attempts") + _count(other, "attempts"),
        "hints": max(_count(one, "hints"), _count(other, "hints")),
        "passed": bool(one.get("passed")) or bool(other.get("passed")),
        "first_passed": first[0] if first else "",
        "last_tried": max(_text(one, "last_tried"), _text(other, "last_tried")),
    }


def _notebooks(places: Iterable[Path]) -> tuple[dict[str, _Notebook], tuple[str, ...]]:
    """By lab number the notebook in which most was run, and those that are damaged."""
    best: dict[str, _Notebook] = {}
    broken = []
    for path in sorted(path for place in places for path in place.glob(NOTEBOOKS)):
        number, found = path.name[:2], _notebook(path)
        if found is None:
            broken.append(str(path))
        elif number not in best or found.cells_run > best[number].cells_run:
            best[number] = found
    return best, tuple(broken)


def _notebook(path: Path) -> _Notebook | None:
    """What a saved notebook tells. None for a file that is no notebook."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources = [(cell["cell_type"], "".join(cell["source"]), cell.get("execution_count")) for cell in cells]
        saved = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    heading = next((line for kind, text, _ in sources if kind == "markdown" for line in text.splitlines()
                    if line.startswith("# ")), "")
    title = re.sub(r"^#\s*(\d+\s*[·:.–-]\s*)?", "", heading).strip() or path.stem[3:].replace("_", " ")
    code = [(text, count) for kind, text, count in sources if kind == "code" and text.strip()]
    questions = frozenset(key for text, _ in code for key in _ASKED.findall(text))
    return _Notebook(path, title, questions, sum(count is not None for _, count in code), len(code), saved)


def _lab(number: str, notebook: _Notebook | None, progress: dict[str, dict], predictions: dict[str, dict]) -> LabStatus:
    known = registry.of_lab(number)
    tried = [key for key in progress if _lab_of(key) == number]
    order = [*known, *sorted(set(tried) - set(known), key=_by_numbers)]
    exercises = tuple(_exercise(key, known[key].title if key in known else "", progress.get(key, {})) for key in order)
    answered = {key for key, entry in predictions.items() if _lab_of(key) == number and "answer" in entry}
    questions = notebook.questions if notebook else frozenset()
    touched = [each.last_tried for each in exercises]
    if notebook and notebook.cells_run:  # labs are handed out with nothing run, so whoever ran it saved it
        touched.append(notebook.saved)
    return LabStatus(
        number=number,
        title=notebook.title if notebook else f"lab {number}",
        notebook=str(notebook.path) if notebook else "",
        exercises=exercises,
        predictions=len(answered),
        questions=len(questions | answered),
        cells_run=notebook.cells_run if notebook else 0,
        cells=notebook.cells if notebook else 0,
        last_touched=max(touched, default=""),
    )


def _exercise(number: str, title: str, entry: dict) -> ExerciseStatus:
    return ExerciseStatus(number, title, _count(entry, "attempts"), bool(entry.get("passed")), _count(entry, "hints"),
                          _text(entry, "first_passed"), _text(entry, "last_tried"))


def _lab_of(key: str) -> str:
    """"4.1" and "4.best_bucket" belong to lab "04"; anything else to none."""
    number = key.partition(".")[0]
    return number.zfill(2) if number.isascii() and number.isdigit() and "." in key else ""


def _by_numbers(key: str) -> list[tuple[int, str]]:
    """A sort key in which numbers of any length count as numbers."""
    return [(len(part), part) for part in (digits.lstrip("0") for digits in re.findall(r"\d+", key))]


def _count(entry: dict, name: str) -> int:
    value = entry.get(name, 0)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _text(entry: dict, name: str) -> str:
    value = entry.get(name, "")
    return value if isinstance(value, str) else ""
