"""A link: what one rank's bytes queue on. One thread moves, another tells the waiters.

Plain gloo shares the wire between its worker threads, so two buckets issued together both end late;
here they go one after the other, as on a network card with one stream. Futures complete on a second
thread, in order: a callback that issues the next collective, or waits for its work, never blocks the
thread that has to move it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future
from torch.profiler import record_function

from course_lib.record import now


@dataclass(frozen=True)
class Pace:
    """What a link adds to every transfer: seconds before it starts, and seconds per byte (`None`
    where the kernel or the hardware sets the rate)."""

    latency_s: float = 0.0
    s_per_byte: float | None = None


class WireWork(dist.Work):
    """The handle of one transfer. `wait()` raises what went wrong; the default limit is the group's."""

    def __init__(self, what: str, limit_s: float) -> None:
        super().__init__()
        self.what, self.limit_s, self.error = what, limit_s, None
        self.future: Future = Future()
        self._done = threading.Event()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit = timeout.total_seconds() or self.limit_s
        if not self._done.wait(limit):
            raise TimeoutError(f"{self.what} did not finish within {limit:.0f} s: another rank never entered it")
        if self.error is not None:
            raise RuntimeError(f"{self.what} failed: {self.error}") from self.error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self.error is None

    def get_future(self) -> Future:
        return self.future

    def finish(self, error: Exception | None) -> None:
        """Let `wait()` return. Called by the thread that moved the bytes."""
        self.error = error
        self._done.set()

    def tell(self, value: Any) -> None:
        """Complete the future and so run its callbacks. They may issue collectives and wait for the work."""
        if self.error is None:
            self.future.set_result(value)
        else:
            self.future.set_exception(self.error)


@dataclass
class Transfer:
    """One queued item, called `label` in a profile. `start` begins the real transfer and returns the inner
    work; `enter` (paced collectives) returns the time at which the last rank entered."""

    work: WireWork
    start: Callable[[], Any]
    result: Any
    moved_bytes: float
    issued: int
    label: str
    received: bool = False
    enter: Callable[[int], int] | None = None
    before: Callable[[], None] | None = None
    after: Callable[[int, int], None] | None = None


def sleep_until(deadline_ns: int) -> None:
    """Sleep to an absolute deadline on the recorder's clock."""
    left = deadline_ns - now()
    if left > 0:
        time.sleep(left / 1e9)


@dataclass
class Link:
    """Queues of one rank on one link. Collectives share one queue; sends and receives have one for
    each peer, because a receive that waits must not hold up the send its peer waits for."""

    name: str
    pace: Pace
    _queues: dict[str, queue.SimpleQueue] = field(default_factory=dict)
    _finished: queue.SimpleQueue | None = None
    _threads: list[threading.Thread] = field(default_factory=list)
    _busy_until: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, lane: str, item: Transfer) -> WireWork:
        with self._lock:
            if self._finished is None:
                self._finished = queue.SimpleQueue()
                self._start("complete", self._complete)
            if lane not in self._queues:
                self._queues[lane] = queue.SimpleQueue()
                self._start(lane, self._move, self._queues[lane])
        self._queues[lane].put(item)
        return item.work

    def _start(self, what: str, body: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=body, args=args, name=f"{self.name}-{what}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self, limit_s: float = 5.0) -> None:
        """Finish what is queued and end the threads. A thread that is still inside torch while the interpreter
        goes down would abort the process; one that waits for a rank that never comes is left after `limit_s`."""
        deadline = now() + round(limit_s * 1e9)
        for lane in self._queues.values():
            lane.put(None)
        for thread in self._threads[1:]:
            thread.join(max(0.0, (deadline - now()) / 1e9))
        if self._finished is not None:
            self._finished.put(None)
            self._threads[0].join(max(0.0, (deadline - now()) / 1e9))

    def _move(self, items: queue.SimpleQueue) -> None:
        freed = 0
        while True:
            item: Transfer | None = items.get()
            if item is None:
                return
            begin, error = max(item.issued, freed), None
            try:
                if item.before:
                    item.before()
                with record_function(item.label):
                    self._carry(item, begin)
            except Exception as caught:  # whatever gloo raises belongs to the waiter
                error = caught
            freed = now()
            if item.after:
                item.after(begin, freed)
            item.work.finish(error)
            self._finished.put(item)
            del item

    def _carry(self, item: Transfer, begin: int) -> None:
        if item.received:  # the sender has paid for it
            item.start().wait()
            return
        latency = round(self.pace.latency_s * 1e9)
        if self.pace.s_per_byte is None:
            sleep_until(begin + latency)
            item.start().wait()
            return
        last_entry = item.enter(begin) if item.enter else begin
        duration = latency + round(item.moved_bytes * self.pace.s_per_byte * 1e9)
        with self._lock:
            self._busy_until = end = max(last_entry, self._busy_until) + duration
        if item.enter:
            item.start().wait()
            sleep_until(end)
        else:  # a send is paced before it is handed over, so that it cannot arrive early
            sleep_until(end)
            item.start().wait()

    def _complete(self) -> None:
        while True:
            item = self._finished.get()
            if item is None:
                return
            item.work.tell(item.result)
            del item
