"""What a utilisation counter says of a rank that waits: measured on the CPU, and with NVML where there is a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from course_lib.launch import Fabric, run
from course_lib.show.utilisation import Sampled

WINDOW_S = 0.02
"""Seconds between two readings of the CPU counter."""


def waiting(how: str, *, work_s: float = 0.1, late_s: float = 0.3, fabric: str | Fabric = "auto",
            rounds: int = 2) -> Sampled:
    """Rank 0 computes for `work_s` seconds, then waits for rank 1, which is `late_s` seconds later, and again.

    `how` is `"spins"` (it asks in a loop whether the all-reduce is complete) or `"sleeps"` (it is woken). The counter
    is rank 0's CPU time over wall time, in windows of 20 ms; on Linux with the time in which it wanted a core and
    another program had it, so that a busy machine does not look like an idle rank. Useful is when it computed. Raises
    `ValueError` for another `how`.
    """
    if how not in ("spins", "sleeps"):
        raise ValueError(f"waiting: how={how!r}; choose spins or sleeps")
    return run(_on_rank, how, work_s, late_s, rounds, ranks=2, fabric=fabric, timeout_s=60)[0]


def device_waiting(spin_s: float = 1.5) -> float:
    """The utilisation, 0 to 1, that NVML reports of a GPU which runs one kernel that only spins.

    The kernel computes nothing, as a collective does that waits for a late rank. Raises `RuntimeError` without a GPU.
    """
    import statistics

    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("device_waiting: this machine has no CUDA device")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 10_000_000
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    torch.cuda._sleep(round(cycles * spin_s * 1e3 / begin.elapsed_time(end)))
    end.record()
    seen = _sample_until(end.query, torch.cuda.utilization, every_s=0.1)
    # A sample period lasts up to a second: the first readings still speak of the time before.
    return statistics.median(seen[len(seen) // 2:]) / 100


def _sample_until(done: Callable[[], bool], read: Callable[[], float], every_s: float) -> list[float]:
    import time

    seen = [read()]
    while not done():
        time.sleep(every_s)
        seen.append(read())
    return seen


def _on_rank(how: str, work_s: float, late_s: float, rounds: int) -> Sampled | None:
    """The rank's side. Both ranks really compute: what they are given is time, not an emulated device."""
    import time

    import torch
    import torch.distributed as dist

    from course_lib.launch import control_group

    rank, useful = dist.get_rank(), []
    square, small = torch.full((128, 128), 1e-3), torch.ones(4)
    dist.all_reduce(small)
    dist.barrier(control_group())
    stop, readings = threading.Event(), []
    sampler = threading.Thread(target=_read_cpu, args=(threading.get_native_id(), stop, readings), daemon=True)
    if rank == 0:
        sampler.start()
    origin = time.perf_counter()
    for _ in range(rounds):
        begin = time.perf_counter()
        if rank == 1:
            time.sleep(late_s)
        until = time.perf_counter() + work_s
        while time.perf_counter() < until:
            square @ square
        useful.append((begin - origin, time.perf_counter() - origin))
        _wait(dist.all_reduce(small, async_op=True), how)
    stop.set()
    if rank:
        return None
    sampler.join()
    return _sampled(origin, readings, useful)


def _wait(work: Any, how: str) -> None:
    import time

    limit = time.perf_counter() + 30
    while how == "spins" and not work.is_completed() and time.perf_counter() < limit:
        pass
    work.wait()


def _read_cpu(thread: int, stop: threading.Event, readings: list[tuple[float, float]]) -> None:
    import time

    last = False
    while not last:
        last = stop.wait(WINDOW_S) if readings else False
        readings.append((time.perf_counter(), time.process_time() + _kept_waiting_s(thread)))


def _kept_waiting_s(thread: int) -> float:
    """Seconds for which a thread of this process was ready to run and had no core (`schedstat`, Linux); 0 elsewhere."""
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _sampled(origin: float, readings: list[tuple[float, float]], useful: list[tuple[float, float]]) -> Sampled:
    edges = [wall - origin for wall, _ in readings]
    busy = [min(1.0, (used - before) / (wall - since))
            for (since, before), (wall, used) in pairwise(readings)]
    return Sampled(edges, busy, useful)
