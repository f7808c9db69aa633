"""An update on a clock of its own: buckets that need time on the wire, and steps that need time on the device."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from course_lib.lab.offered import offers

READY, COST, STEP, POLL = 1.0, 1.5, 0.4, 0.01
"""Seconds between two full buckets in backward, of a bucket on the wire, of its step, and of asking once."""
PATIENCE = 20
"""Asking a handle as often as this, in vain, is waiting for it."""


class Update(NamedTuple):
    """What happened in one update, as the numbers of buckets; `scheduler` holds how many steps preceded each call."""

    number: int
    micro_steps: int
    buckets: int
    sent_early: list[int]
    sent_late: list[int]
    waited_in_backward: list[int]
    stepped_early: list[int]
    stepped_late: list[int]
    cleared: list[int]
    launched: list[int]
    stepped: list[int]
    scheduler: list[int]

    def once(self) -> bool:
        return sorted(self.stepped) == list(range(self.buckets))

    def right(self) -> bool:
        odd = (self.sent_early, self.sent_late, self.waited_in_backward, self.stepped_early, self.stepped_late,
               self.cleared)  # fmt: skip
        return not any(odd) and self.once() and self.scheduler == [self.buckets]

    def __str__(self) -> str:
        said = [f"update {self.number + 1}: {self.micro_steps} micro-steps, {self.buckets} buckets"]
        for what, which in (("sent or stepped before the last micro-step", self.sent_early),
                            ("launched later than full", self.sent_late),
                            ("backward waited for", self.waited_in_backward), ("launched", self.launched),
                            ("stepped before the wait", self.stepped_early),
                            ("stepped after waiting for a later one", self.stepped_late),
                            ("zeroed before the step", self.cleared), ("stepped", self.stepped)):
            if which:
                said.append(f"{what}: {', '.join(map(str, which))}")
        calls = ", ".join(map(str, self.scheduler))
        return "; ".join([*said, f"scheduler stepped after {calls} steps" if calls else "scheduler never stepped"])


class Clock:
    """The state of a run: the time, what the wire carries, and the update that is being noted."""

    def __init__(self) -> None:
        self.now = self.free = 0.0
        self.last = self.in_backward = False
        self.begin(0, 0, 0)

    def begin(self, number: int, micro_steps: int, buckets: int) -> None:
        self.noted = Update(number, micro_steps, buckets, *([] for _ in range(9)))
        self.arrives: dict[int, Handle] = {}
        self.blocked: list[tuple[int, float]] = []
        self.asked: list[tuple[int, float]] = []
        self.held: set[int] = set()

    def fill(self, bucket: int, last: bool) -> None:
        """Backward comes to the bucket: it holds a gradient now that no step has used."""
        self.now += READY
        self.last, self.filling = last, bucket
        self.held.add(bucket)

    def ask(self, bucket: int) -> None:
        """In vain."""
        self.asked.append((bucket, self.now))
        if self.in_backward and Counter(asked for asked, _ in self.asked)[bucket] == PATIENCE:
            self.noted.waited_in_backward.append(bucket)

    def waited_beyond(self, handle: Handle) -> bool:
        """Whether a later bucket was waited for when this one was there."""
        asked = sum(later > handle.bucket and at >= handle.at for later, at in self.asked)
        return asked >= PATIENCE or any(later > handle.bucket and at >= handle.at for later, at in self.blocked)


@offers("wait", "is_completed")
class Handle:
    """Of one launch."""

    def __init__(self, clock: Clock, bucket: int, at: float) -> None:
        self._clock, self.bucket, self.at, self.seen = clock, bucket, at, False

    def wait(self, timeout: object = None) -> bool:
        """Time passes until the bucket is there."""
        clock = self._clock
        if self.at > clock.now:
            clock.blocked.append((self.bucket, clock.now))
            if clock.in_backward:
                clock.noted.waited_in_backward.append(self.bucket)
            clock.now = self.at
        self.seen = True
        return True

    def is_completed(self) -> bool:
        self._clock.now += POLL
        self.seen = self.seen or self.at <= self._clock.now
        if not self.seen:
            self._clock.ask(self.bucket)
        return self.seen


@offers("launch")
class Wire:
    """`launch(b)` starts the mean of bucket b over the ranks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def launch(self, bucket: int) -> Handle:
        clock = self._clock
        if bucket not in range(clock.noted.buckets):
            raise ValueError(f"launch takes the number of a bucket, 0 to {clock.noted.buckets - 1}, not {bucket!r}")
        if clock.last and bucket in clock.arrives:
            raise ValueError(f"bucket {bucket} was launched a second time; the other ranks do not expect it again")
        if clock.last and clock.in_backward and bucket > clock.filling:
            raise ValueError(f"bucket {bucket} was launched before it is full, when bucket {clock.filling} was")
        clock.free = max(clock.free, clock.now) + COST
        handle = Handle(clock, bucket, clock.free)
        clock.noted.launched.append(bucket)
        if not clock.in_backward or (clock.last and bucket < clock.filling):
            clock.noted.sent_late.append(bucket)
        if clock.last:
            clock.arrives[bucket] = handle
        else:
            clock.noted.sent_early.append(bucket)
        return handle


@offers("step", "zero_grad")
class Optimizer:
    """Of one bucket."""

    def __init__(self, clock: Clock, bucket: int) -> None:
        self._clock, self._bucket = clock, bucket

    def step(self) -> None:
        clock, bucket = self._clock, self._bucket
        handle = clock.arrives.get(bucket)
        if not clock.last:
            clock.noted.sent_early.append(bucket)
        elif handle is None or not handle.seen:
            clock.noted.stepped_early.append(bucket)
        elif bucket not in clock.noted.stepped and clock.waited_beyond(handle):
            clock.noted.stepped_late.append(bucket)
        clock.noted.stepped.append(bucket)
        clock.held.discard(bucket)
        clock.now += STEP

    def zero_grad(self, set_to_none: bool = True) -> None:
        """After the step it does no harm: the workbench empties the buckets before each update."""
        if self._bucket in self._clock.held:
            self._clock.noted.cleared.append(self._bucket)


@offers("step")
class Scheduler:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def step(self) -> None:
        self._clock.noted.scheduler.append(len(self._clock.noted.stepped))
