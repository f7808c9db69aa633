"""The learner's `feed` on a bus that is emulated by a thread that copies, and real readers beside each other.

The bus takes its time and moves real bytes, a part at a time, into one of two places on the "device". What CUDA does
with pageable memory is imitated (the call returns when the copy has ended), and the lab says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from course_lib.lab.guard import Broke, call
from course_lib.lab.workbench.buckets import OwnRunFailed
from course_lib.train import data
from course_lib.train.prefetch import Prefetch

PARTS = 8
LIMIT_S = 30.0


class Epoch(NamedTuple):
    """One pass over `batches` batches: milliseconds, and how many batches were computed on other numbers."""

    batches: int
    ms: float
    wrong: int


class Pinned(NamedTuple):
    """A batch in memory that the bus takes for page-locked."""

    batch: torch.Tensor


class Copy:
    """A batch on its way to the device."""

    def __init__(self, place: torch.Tensor, done: Future, waits: bool) -> None:
        self.data, self._done, self._waits = place, done, waits

    def wait(self) -> None:
        """Block until the copy has ended."""
        if self._waits:
            self._done.result(LIMIT_S)


class EmulatedBus:
    """`pin`, `copy` and `compute` of exercise 6.3, each in the time that is given. With `pins=False` all memory is
    pageable, with `waits=False` nobody waits for a copy: the two pitfalls, with the same `feed`."""

    def __init__(self, elements: int, copy_ms: float, compute_ms: float, pins: bool = True, waits: bool = True) -> None:
        self._places = [torch.zeros(elements), torch.zeros(elements)]
        self._copy_s, self._compute_s, self._pins, self._waits = copy_ms / 1e3, compute_ms / 1e3, pins, waits
        self._copied = 0
        self.thread = ThreadPoolExecutor(1, "bus")

    def pin(self, batch: torch.Tensor) -> Pinned | torch.Tensor:
        return Pinned(batch.clone()) if self._pins else batch

    def copy(self, batch: Pinned | torch.Tensor) -> Copy:
        source = batch.batch if isinstance(batch, Pinned) else batch
        place = self._places[self._copied % 2]
        self._copied += 1
        done = self.thread.submit(self._move, source, place)
        if not isinstance(batch, Pinned):
            done.result(LIMIT_S)
        return Copy(place, done, self._waits)

    def compute(self, batch: torch.Tensor) -> float:
        """One step: what it read when it began, after as long as a step takes."""
        found = float(batch.double().sum())
        time.sleep(self._compute_s)
        return found

    def _move(self, source: torch.Tensor, place: torch.Tensor) -> None:
        begin = time.perf_counter()
        for i, (part, there) in enumerate(zip(source.chunk(PARTS), place.chunk(PARTS)), 1):
            time.sleep(max(0.0, begin + self._copy_s * i / PARTS - time.perf_counter()))
            there.copy_(part)


def input_runs(feed: Callable, batches: int = 12, copy_ms: float = 14.0,
               compute_ms: float = 12.0) -> dict[str, Epoch]:
    """The learner's `feed` on three buses. Raises `OwnRunFailed` with one sentence for whatever it does wrong."""
    kinds = {"yours": {}, "from pageable memory": {"pins": False}, "read before the copy ended": {"waits": False}}
    source = [torch.full((4096,), float(i)) for i in range(1, batches + 1)]
    right = [float(batch.double().sum()) for batch in source]
    found = {}
    for name, kind in kinds.items():
        bus = EmulatedBus(len(source[0]), copy_ms, compute_ms, **kind)
        begin = time.perf_counter()
        try:
            results = list(call(feed, list(source), bus, bus.compute, shown=f"feed({batches} batches, bus, compute)"))
        except Broke as broke:
            raise OwnRunFailed(str(broke)) from broke
        finally:
            bus.thread.shutdown(wait=False, cancel_futures=True)
        ms = (time.perf_counter() - begin) * 1e3
        found[name] = Epoch(batches, ms, sum(a != b for a, b in zip(results, right)) + abs(len(right) - len(results)))
    return found


class SlowText(Dataset):
    """Rows of real text whose reading takes `read_ms` a batch, as from a remote disk. It sleeps; decoding that keeps a
    core busy would need workers in processes."""

    def __init__(self, batches: int, read_ms: float) -> None:
        self._rows = list(data.batches(data.text(0.1), 4, 64, batches))
        self._read_s = read_ms / 1e3

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> data.Batch:
        if index >= len(self):
            raise IndexError(index)
        time.sleep(self._read_s)
        return self._rows[index]


def readers(batches: int = 12, read_ms: float = 10.0, compute_ms: float = 12.0) -> dict[str, Epoch]:
    """One epoch over `SlowText` through each way of reading. The second epoch of the loader with workers is timed,
    because starting processes is no part of reading."""
    rows = SlowText(batches, read_ms)
    # one thread a worker, and no copy of this process's threads: workers only read
    workers = DataLoader(rows, batch_size=None, num_workers=2, prefetch_factor=2, persistent_workers=True)
    ways: dict[str, Iterable] = {"in the loop": DataLoader(rows, batch_size=None), "Prefetch": Prefetch(rows),
                                 "DataLoader, 2 workers": workers}
    for _ in workers:
        pass
    return {name: _epoch(way, rows, compute_ms) for name, way in ways.items()}


def _epoch(way: Iterable, rows: SlowText, compute_ms: float) -> Epoch:
    begin, seen = time.perf_counter(), []
    for x, _ in way:
        seen.append(x)
        time.sleep(compute_ms / 1e3)
    ms = (time.perf_counter() - begin) * 1e3
    return Epoch(len(rows), ms, sum(not torch.equal(a, b[0]) for a, b in zip(seen, rows._rows)))
