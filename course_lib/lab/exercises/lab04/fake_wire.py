"""A wire in one process that writes down what is asked of it, and when: no ranks, no clock, no chance."""

from __future__ import annotations

from typing import NamedTuple

from course_lib.lab.offered import offers


class Event(NamedTuple):
    """`what` is "launch" or "wait"; `during` is the number of the hook call it happened in, from 0."""

    what: str
    bucket: int
    during: int


@offers("wait", "is_completed")
class FakeWork:
    """The handle of a launched bucket."""

    def __init__(self, wire: FakeWire, bucket: int) -> None:
        self._wire, self.bucket = wire, bucket

    def wait(self, timeout: object = None) -> bool:
        """On ranks this blocks until the bucket has arrived."""
        self._wire.note("wait", self.bucket)
        return True

    def is_completed(self) -> bool:
        """Asking in a loop is waiting too, so it is noted as that."""
        return self.wait()


@offers("launch")
class FakeWire:
    """`launch(bucket)` returns a handle at once, as the real one does. It carries `buckets` of them."""

    def __init__(self, buckets: int) -> None:
        self.buckets = buckets
        self.events: list[Event] = []
        self.call = -1

    def launch(self, bucket: int) -> FakeWork:
        """Raises `ValueError` for what is not the number of a bucket."""
        if bucket not in range(self.buckets):
            raise ValueError(f"launch takes the number of a bucket, 0 to {self.buckets - 1}, not {bucket!r}")
        self.note("launch", bucket)
        return FakeWork(self, bucket)

    def note(self, what: str, bucket: int) -> None:
        self.events.append(Event(what, bucket, self.call))

    def launches(self) -> list[Event]:
        return [event for event in self.events if event.what == "launch"]

    def waits(self) -> list[Event]:
        return [event for event in self.events if event.what == "wait"]
