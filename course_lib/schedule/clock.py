"""When each action of a pass began and ended: on the host, on an emulated device, or by CUDA events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from course_lib import record
from course_lib.schedule.action import COMPUTE, Action, Op
from course_lib.train.emulated import device


class Clock:
    """Records compute as spans of lane `device`, named as the schedule names the actions, while somebody records."""

    def __init__(self, where: torch.device) -> None:
        self._cuda = where.type == "cuda"
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._first: int | torch.cuda.Event = 0

    def begin(self) -> None:
        """The pass starts now; so does the emulated device, however long it was idle."""
        device.busy_until = max(device.busy_until, record.now())
        if self._cuda and record.active() is not None:
            torch.cuda.synchronize()
            self._origin_ns, self._origin = record.now(), self._event()

    @contextmanager
    def action(self, action: Action, name: str) -> Iterator[None]:
        recorder = record.active()
        if recorder is None or action.op not in COMPUTE | {Op.STEP}:
            yield
            return
        before = len(recorder.rows)
        self.mark()
        yield
        if self._cuda:
            self._events.append((name, self._first, self._event()))
        elif not _named(recorder, before, name):
            recorder.add("compute", "device", name, self._first, record.now())

    def wait(self, work: dist.Work) -> None:
        """Wait for a message; what is computed with it begins after that. On CUDA only the stream waits."""
        if self._cuda or not work.is_completed():
            work.wait()
            device.busy_until = max(device.busy_until, record.now())
        self.mark()

    def mark(self) -> None:
        """The action that is under way computes from here on."""
        self._first = self._event() if self._cuda else record.now()

    def end(self) -> None:
        """Turn events into spans."""
        if self._events:
            torch.cuda.synchronize()
        for name, first, last in self._events:
            start, stop = (self._origin_ns + round(self._origin.elapsed_time(e) * 1e6) for e in (first, last))
            record.active().add("compute", "device", name, start, stop)
        self._events.clear()

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _named(recorder: record.Recorder, before: int, name: str) -> bool:
    """Give what an emulated device recorded during an action the action's name. False where it did nothing."""
    found = False
    for k in range(before, len(recorder.rows)):
        rank, kind, lane, _, *rest = recorder.rows[k]
        if (kind, lane) == ("compute", "device"):
            recorder.rows[k], found = (rank, kind, lane, name, *rest), True
    return found
