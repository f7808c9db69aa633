"""What rank 0 shows of a run: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from course_lib.job import checkpoint
from course_lib.job.metrics import rows

EVERY_S = 5.0
"""How often a line is written where there is no terminal."""


class Bar:
    def __init__(self, start: int, steps: int) -> None:
        self._steps, self._last = steps, 0.0
        columns = (TextColumn("update"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[said]}"),
                   TimeRemainingColumn())
        self._progress = Progress(*columns) if sys.stdout.isatty() else None
        if self._progress is not None:
            self._task = self._progress.add_task("", total=steps, completed=start, said="")
            self._progress.start()

    def show(self, row: dict[str, Any]) -> None:
        exposed = "" if row["exposed_ms"] is None else f", {row['exposed_ms']:.1f} exposed"
        said = f"loss {row['loss']:.4f}, {row['tokens_per_s']:,.0f} tokens/s, {row['step_ms']:.1f} ms{exposed}"
        if self._progress is not None:
            self._progress.update(self._task, completed=row["step"], said=said)
        elif row["step"] == self._steps or time.monotonic() - self._last >= EVERY_S:
            self._last = time.monotonic()
            print(f"update {row['step']}/{self._steps}: {said}", flush=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def interrupted(out: Path) -> str:
    """What to say of a run that somebody has stopped, from what it left."""
    metrics = out / "metrics.jsonl"
    made, saved = rows(metrics) if metrics.is_file() else [], checkpoint.steps(out)
    return (f"interrupted at step {made[-1]['step'] if made else 0}; run the same command again to " +
            (f"go on from step {saved[-1]}" if saved else "start anew, as there is no checkpoint yet"))
