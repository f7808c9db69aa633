"""Live capture by torch.profiler: the same `Timeline` as the light recorder's, from the profiler's events.

All threads are profiled, so that the Wire's transfers (`wire::…`) appear beside the operators.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from course_lib.labels import EMULATED, emulated_work
from course_lib.timeline import Span, Timeline

_WIRE = re.compile(r"wire::(\w+) bytes=(\d+)(?: bucket=(\d+))?")
_STEP = "course::step "
_OPERATORS = ("aten::", "mkldnn::", "quantized::", "torch::")


@dataclass
class Capture:
    """What a `profiled()` block saw; `timeline()` once the block has ended."""

    spans: list[Span] = field(default_factory=list)
    provenance: str = "measured (cpu)"

    def timeline(self) -> Timeline:
        return Timeline.of(self.spans, self.provenance)


def profiled_step(index: int) -> record_function:
    """Mark one step inside a `profiled()` block."""
    return record_function(f"{_STEP}{index}")


@contextmanager
def profiled(trace: str | Path | None = None) -> Iterator[Capture]:
    """Profile this rank. With `trace`, also write a Chrome trace that `chrome://tracing`, Perfetto and
    `course trace` read.

    Compute is what operators do; on an emulated device it is what the device itself reports, and nothing else.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    # Below this level the profiler writes a line at every start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # A process that has used no CUDA device has nothing to show there, and its file would ask where its kernels are.
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_initialized() else [])
    capture = Capture()
    with profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True)) as prof:
        yield capture
    if trace is not None:
        prof.export_chrome_trace(str(trace))
    events = [(e.name(), e.start_ns(), e.start_ns() + e.duration_ns(), e.start_thread_id())
              for e in prof.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CPU]
    emulated = any(name.startswith(EMULATED) for name, *_ in events)
    if emulated:
        capture.provenance = "measured (real wires, emulated device)"
    capture.spans += _steps_and_wire(rank, events)
    capture.spans += _emulated(rank, events) if emulated else _operators(rank, events)


def _steps_and_wire(rank: int, events: list[tuple[str, int, int, int]]) -> Iterator[Span]:
    for name, start, stop, _ in events:
        if name.startswith(_STEP):
            yield Span(rank, "step", "step", name.removeprefix("course::"), start, stop, step=int(name[len(_STEP):]))
        elif match := _WIRE.match(name):
            op, nbytes, bucket = match.groups(default="-1")
            yield Span(rank, "comm", "wire", op, start, stop, int(nbytes), int(bucket))


def _emulated(rank: int, events: list[tuple[str, int, int, int]]) -> Iterator[Span]:
    for label, start, stop, _ in events:
        if (work := emulated_work(label, start, stop)) is not None:
            yield Span(rank, "compute", "device", *work)


def _operators(rank: int, events: list[tuple[str, int, int, int]]) -> Iterator[Span]:
    """Operators that compute, on every thread but the Wire's. Only operators: what encloses them (autograd
    nodes, DDP's forward, the optimizer's step, c10d dispatch) may merely wait. An operator inside another
    adds nothing to the union, so it is left out."""
    moving = {thread for name, _, _, thread in events if name.startswith("wire::")}
    reached: dict[int, int] = {}
    for name, start, stop, thread in sorted(events, key=lambda e: (e[3], e[1], -e[2])):
        if thread in moving or not name.startswith(_OPERATORS) or stop <= reached.get(thread, 0):
            continue
        reached[thread] = stop
        yield Span(rank, "compute", "compute", name, start, stop)
