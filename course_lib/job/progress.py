"""What rank 0 shows of a run: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
