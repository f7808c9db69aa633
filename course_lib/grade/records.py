"""What is written down: a journal that survives a crash, the table of grades, one result file a learner."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from course_lib.grade.outcome import Judgement

VERSION = 2
"""Of the way in which submissions are judged. A new one makes every recorded grade outdated."""
COLUMNS = ("id", "lab", "status", "points", "max_points", "overlap", "fair_score", "seconds", "isolation", "note")


def key_of(data: bytes, template_text: str) -> str:
    """What a grade depends on: the submission, the template, the grader."""
    digest = hashlib.sha256(data)
    digest.update(b"\0" + template_text.encode() + f"\0{VERSION}".encode())
    return digest.hexdigest()


class Journal:
    """`journal.jsonl`: a line for each judgement, on the disk before the next begins.

    A line that was cut off by a crash is passed over.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other graders out of the folder, which is made if it is not there. Raises `OSError` if one is in it, or
        if nothing can be written there: before anything is judged."""
        import fcntl

        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OSError(f"another grader is writing to {self._path.parent}: wait for it, or give another --out"
                              ) from None  # fmt: skip
            except OSError:  # a file system without locks
                pass
            yield

    def read(self) -> dict[tuple[str, str], Judgement]:
        """The latest judgement by (id, key)."""
        found = {}
        if not self._path.exists():
            return found
        for line in self._path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                entry = json.loads(line)
                found[entry["id"], entry["key"]] = Judgement.from_dict(entry["judgement"])
            except (ValueError, KeyError, TypeError):
                continue
        return found

    def append(self, key: str, judgement: Judgement) -> None:
        entry = {"id": judgement.id, "key": key, "judgement": judgement.as_dict()}
        with open(self._path, "a+b") as file:
            if file.tell() and not self._ends_a_line(file):
                file.write(b"\n")
            file.write(json.dumps(entry, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def _ends_a_line(file: io.BufferedRandom) -> bool:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def write_grades(path: Path, judgements: Iterable[Judgement]) -> None:
    """`grades.csv`: one row a learner, all fields quoted; points are blank, not 0, where the grader failed."""
    text = io.StringIO()
    table = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    table.writerow(COLUMNS)
    for judgement in judgements:
        table.writerow(_harmless(cell) for cell in row_of(judgement))
    replace_file(path, text.getvalue())


def row_of(judgement: Judgement) -> list[str]:
    """The columns of `grades.csv` as texts."""
    j = judgement
    return [j.id, j.lab, j.status, _number(j.points), _number(j.max_points), _number(j.overlap, 3),
            _number(j.fair_score, 3), _number(j.seconds, 1), j.isolation, j.note]  # fmt: skip


def write_result(path: Path, judgement: Judgement) -> None:
    """`results/<id>.json` in Gradescope's schema."""
    tests = []
    for part in judgement.parts:
        said = [part.sentence, part.hint and f"What this looks like: {part.hint}"]
        said += [f"{'✔' if row.ok else '✘'} {row.name}" for row in part.rows]
        test = {"name": f"{part.id} {part.title}", "number": part.id, "max_score": part.max_points,
                "status": "passed" if part.outcome == "ok" else "failed",
                "output": "\n".join(line for line in said if line), "visibility": "visible"}  # fmt: skip
        tests.append(test if part.points is None else test | {"score": part.points})
    result = {"output": judgement.note, "visibility": "visible", "stdout_visibility": "hidden", "tests": tests,
              "extra_data": {"status": judgement.status, "isolation": judgement.isolation,
                             "overlap": judgement.overlap, "fair_score": judgement.fair_score}}  # fmt: skip
    if judgement.points is not None:
        result["score"] = judgement.points
    replace_file(path, json.dumps(result, indent=1, ensure_ascii=False))


def replace_file(path: Path, text: str) -> None:
    """Write in one step: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{round(value, digits):g}" if digits < 3 else f"{value:.{digits}f}"


def _harmless(text: str) -> str:
    """A spreadsheet must not take a learner's text for a formula."""
    one_line = " ".join(text.split())
    formula = one_line[:1] in ("=", "+", "@") or (one_line[:1] == "-" and not _is_number(one_line))
    return f"'{one_line}" if formula else one_line


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
