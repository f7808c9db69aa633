"""metrics.jsonl: one line an update, whatever happens to the run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from course_lib.job.together import JobError


class Metrics:
    """Appends lines to a file in which the updates after `step` are not made yet: their lines, and what a kill left of
    a line, are cut off at the start."""

    def __init__(self, path: Path, step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = path, path.open("ab+", buffering=0)
        self._file.truncate(_end_of(path, step))

    def add(self, row: dict[str, Any]) -> None:
        """One write for the whole line, so that a kill leaves all of it or nothing. A number that is not finite becomes
        null: JSON has no word for it."""
        known = {key: None if isinstance(value, float) and not math.isfinite(value) else value
                 for key, value in row.items()}
        line = json.dumps(known, allow_nan=False).encode() + b"\n"
        with self._writing():
            while line:  # the rest of what a full disk took in part says why
                line = line[self._file.write(line):]

    def sync(self) -> None:
        """Everything is on the disk on return: a checkpoint never knows more updates than the file."""
        with self._writing():
            os.fsync(self._file.fileno())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise JobError(f"{self._path} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        self._file.close()


def rows(path: Path) -> list[dict[str, Any]]:
    """What the file says, up to the first line that is not whole."""
    return [row for row, _ in _rows(path)]


def _end_of(path: Path, step: int) -> int:
    end = 0
    for row, stop in _rows(path):
        if row["step"] > step:
            break
        end = stop
    return end


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Each row, and where it ends."""
    stop = 0
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                return
            if not line.endswith(b"\n") or not isinstance(row, dict) or not isinstance(row.get("step"), int):
                return
            stop += len(line)
            yield row, stop
