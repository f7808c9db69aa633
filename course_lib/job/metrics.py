"""metrics.jsonl: one line an update, whatever happens to the run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Metrics:
    """Appends lines to a file in which the updates after `step` are not made yet: their lines, and what a kill left of
    a line, are cut off at the start."""

    def __init__(self, path: Path, step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+", buffering=0)
        self._file.truncate(_end_of(path, step))

    def add(self, row: dict[str, Any]) -> None:
        """One write for the whole line, so that a kill leaves all of it or nothing."""
        self._file.write(json.dumps(row).encode() + b"\n")

    def sync(self) -> None:
        """Everything is on the disk on return: a checkpoint never knows more updates than the file."""
        os.fsync(self._file.fileno())

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
