"""A device beside its host, in one process and without a clock: what is copied, waited for and computed, in order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from course_lib.lab.offered import offers


class Event(NamedTuple):
    """`what` is "copy", "wait" or "compute", of batch `number`; `pinned` says what kind of memory a copy began in."""

    what: str
    number: int
    pinned: bool = True


@offers()
class PageLocked(list):
    """A batch in memory that does not move, so that the device can fetch it by itself."""


@offers()
class DeviceMemory(list):
    """A batch's memory on the device."""


@offers("data", "wait")
class OnDevice:
    """A copy on its way. `data` is its memory on the device; what is in it is right once the copy has ended."""

    def __init__(self, bus: SlowBus, number: int, batch: Sequence[float]) -> None:
        self._bus, self._number, self._batch = bus, number, list(batch)
        self.data = DeviceMemory([math.nan] * len(self._batch))

    def wait(self) -> None:
        """Block until the copy has ended."""
        self._bus.events.append(Event("wait", self._number))
        self.data[:] = self._batch


@offers("pin", "copy")
class SlowBus:
    """What `feed` gets as `bus`, and its `compute`. `events` is what it did."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._sent: list[OnDevice] = []

    def pin(self, batch: Sequence[float]) -> PageLocked:
        """The batch in page-locked memory."""
        return PageLocked(batch)

    def copy(self, batch: Sequence[float]) -> OnDevice:
        """Start the copy of a batch to the device. Raises `TypeError` for what is no batch of numbers."""
        if not isinstance(batch, list) or not all(isinstance(value, float) for value in batch):
            raise TypeError(f"copy takes a batch, or what pin(batch) gave, and this is a {type(batch).__name__}")
        number = len(self._sent)
        self.events.append(Event("copy", number, isinstance(batch, PageLocked)))
        self._sent.append(OnDevice(self, number, batch))
        return self._sent[-1]

    def compute(self, data: Sequence[float]) -> float:
        """One step on the device: the sum of a batch that is there. Raises `TypeError` for anything else."""
        for number, sent in enumerate(self._sent):
            if sent.data is data:
                self.events.append(Event("compute", number))
                return sum(data)
        raise TypeError("compute takes the `data` of a copy: the device cannot reach the host's memory")
