"""Predicted against published: the error of every row, and of every source."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from course_lib.plan.calibrate import family, left_out
from course_lib.plan.published import MemoryRow, TimeRow, llm_foundry_rows, memory_rows, time_rows


@dataclass(frozen=True)
class Compared:
    """One row: `unit` is s, MFU or bytes. `error`: (predicted − published) / published. `left_out`: the same by a fit
    to all other rows of that type of GPU; None where that was not asked for or the row is never fitted."""

    source: str
    name: str
    unit: str
    published: float
    predicted: float
    fitted: bool
    left_out: float | None = None

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class Summary:
    """Absolute relative errors of one source."""

    source: str
    unit: str
    rows: int
    mean: float
    median: float
    worst: float


def compare(csv: Path | None = None, *, leave_out: bool = False) -> list[Compared]:
    """All rows of the package, and those of a llm-foundry table. `leave_out` fits once for each fitted row (some ten
    seconds without a table, minutes with one). Raises `Impossible` for a file that is no such table."""
    rows = time_rows() + (llm_foundry_rows(csv) if csv else [])
    without = _left_out(rows) if leave_out else {}
    found = [Compared(r.source, r.name, "s", r.seconds, r.predicted(), r.fitted, without.get(id(r))) for r in rows]
    found += [Compared(r.source, r.name, "MFU", r.mfu, r.predicted_mfu(), r.fitted) for r in rows if r.mfu]
    return found + [_memory(row) for row in memory_rows()]


def summaries(rows: Sequence[Compared], *, leave_out: bool = False) -> list[Summary]:
    """One a source and unit, in the order in which they appear. `leave_out`: of the errors of rows left out."""
    found = []
    for source, unit in dict.fromkeys((row.source, row.unit) for row in rows):
        errors = [abs(error) for row in rows if (row.source, row.unit) == (source, unit)
                  and (error := row.left_out if leave_out else row.error) is not None]
        if errors:
            found.append(Summary(source, unit, len(errors), statistics.mean(errors), statistics.median(errors),
                                 max(errors)))
    return found


def median_error() -> float:
    """Of the time of the published runs in the package, absolute and relative."""
    return statistics.median(abs(row.predicted() / row.seconds - 1) for row in time_rows())


def most_mfu(gpu: str) -> float | None:
    """The highest of the published runs on that type of GPU, whatever its memory; None without any."""
    kind = gpu.partition("-")[0]
    return max((row.published_mfu() for row in time_rows() if family(row) == kind), default=None)


def _memory(row: MemoryRow) -> Compared:
    return Compared(row.source, row.name, "bytes", row.bytes, row.predicted(), fitted=False)


def _left_out(rows: Sequence[TimeRow]) -> dict[int, float]:
    found: dict[int, float] = {}
    for kind in {family(row) for row in rows}:
        fitted = [row for row in rows if row.fitted and family(row) == kind]
        found |= dict(zip(map(id, fitted), left_out(fitted)))
    return found
