"""Steps of a strategy on real ranks under torch.profiler, read back from the trace files that it wrote."""

from __future__ import annotations

import atexit
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib import trace
from course_lib.launch import Fabric, run

if TYPE_CHECKING:
    from torch import nn

    from course_lib.timeline import Timeline
    from course_lib.trace import Trace

Events = list[tuple[int, str, str, int, int]]
Steps = dict[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Profiled:
    """`folder` holds a Chrome trace a rank, `trace` is what `course_lib.trace` reads there. `plain_ms` is the median
    step on the slowest rank before the profiler was switched on, in milliseconds."""

    folder: Path
    trace: Trace
    plain_ms: float

    @property
    def timeline(self) -> Timeline:
        return self.trace.timeline


def profiled_run(model: Callable[[], nn.Module], strategy: str, options: Mapping[str, Any] | None = None, *,
                 ranks: int = 2, fabric: str | Fabric = "auto", steps: int = 3,
                 late_ms: Mapping[int, float] | None = None, folder: Path | None = None,
                 timeout_s: float = 120.0) -> Profiled:
    """Run `steps` steps of a strategy of `train.STRATEGIES` plainly, then as many under torch.profiler on every rank.

    `model()` builds an emulated model. `late_ms` maps a rank to the milliseconds for which it waits for its input
    before each forward. Traces are written to `folder` as `rank-<n>.json`; the default is a
    temporary one that goes when this process ends.
    """
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="course-trace-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    rows = run(_on_rank, model, strategy, dict(options or {}), steps, dict(late_ms or {}), str(folder), ranks=ranks,
               fabric=fabric, timeout_s=timeout_s)
    slowest = [max(times) for times in zip(*rows)]
    return Profiled(folder, trace.load(folder), statistics.median(slowest) / 1e6)


def events_of(timeline: Timeline) -> tuple[Events, Steps]:
    """What happened on devices and wires, as exercise 5.2 takes it: (rank, category, name, start, stop) of every
    piece of work, and (start, stop) of every (rank, step), in nanoseconds.

    An emulated device and the course's wire have no kernels; what they did is listed as if they had.
    """
    names = {"compute": "emulated::{}", "comm": "wire::{}"}
    events = [(s.rank, "kernel", names[s.kind].format(s.name), s.start, s.stop) for s in timeline if s.kind in names]
    return events, {(s.rank, s.step): (s.start, s.stop) for s in timeline if s.kind == "step"}


def _on_rank(build, strategy, options, steps, late_ms, folder):
    """The rank's side. Every step begins together, so that a rank is late by what it waits for and no more."""
    import time

    import torch.distributed as dist

    from course_lib.launch import control_group
    from course_lib.record import now
    from course_lib.train import wrap
    from course_lib.train.profiled import profiled, profiled_step
    from course_lib.tune.sweep import tiny_micro_step

    rank = dist.get_rank()
    wrapped = wrap(strategy, build(), **options)

    def step() -> int:
        begin = now()
        time.sleep(late_ms.get(rank, 0) / 1e3)
        tiny_micro_step(wrapped).backward()
        wrapped.finish_gradient_synchronization()
        return now() - begin

    def begin() -> None:
        wrapped.zero_grad(set_to_none=False)
        dist.barrier(control_group())

    begin()
    step()
    plain = []
    for _ in range(steps):
        begin()
        plain.append(step())
    with profiled(Path(folder) / f"rank-{rank}.json"):
        for index in range(steps):
            begin()
            with profiled_step(index):
                step()
    return plain
