"""Reductions of a sharded model's gradient: in the reverse order of the units, and as many on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from course_lib.train.sharded_unit import Unit


class Reductions:
    """Those of `units` that are to come in this backward pass, and those on their way. `in_turn`: one at a time, for
    the memory. With `keep` the buffer that has travelled becomes the unit's next gradient."""

    def __init__(self, units: Sequence[Unit], op: str, in_turn: bool, keep: bool) -> None:
        self._units, self._op, self._in_turn, self._keep = units, op, in_turn, keep
        self._flying: deque[tuple[Unit, torch.Tensor, dist.Work]] = deque()
        self._ready: set[int] = set()
        self.left = 0
        """To come in this backward pass."""
        self.sent = 0
        """Issued since the ranks last compared notes."""

    def begin(self) -> None:
        """A synchronised backward pass begins."""
        self.left = len(self._units)

    def forget_ready(self) -> None:
        self._ready.clear()

    def ready(self, units: Sequence[Unit], running: bool) -> None:
        """The gradients of `units` are complete. Reductions leave in their order, on every rank, whatever it used."""
        self._ready |= {unit.index for unit in units}
        while running and self.left and self.left - 1 in self._ready:
            self._launch()

    def rest(self) -> None:
        """Send what is left of the backward pass."""
        while self.left:
            self._launch()

    def arrive(self, allowed: int = 0) -> None:
        """Take in what has been reduced, and wait until at most `allowed` reductions are on their way."""
        while self._flying and (len(self._flying) > allowed or self._flying[0][2].is_completed()):
            unit, whole, work = self._flying.popleft()
            work.wait()
            unit.arrived(whole)
            if self._keep and unit.gradient is None:
                unit.gradient = whole.zero_()

    def finish(self) -> None:
        """All ranks agree that the window is complete: wait for its gradient."""
        self.arrive()
        self.sent = 0

    def drain(self, sent: int) -> None:
        """Send up to `sent`, so that all ranks issued the same, and give up what arrives."""
        while self.sent < sent:
            self.left = self.left or len(self._units)
            self._launch()
        self.arrive()
        self.sent = self.left = 0
        for unit in self._units:
            unit.sum = unit.gradient = None

    def _launch(self) -> None:
        self.left -= 1
        self.sent += 1
        self.arrive(0 if self._in_turn else len(self._units))
        unit = self._units[self.left]
        unit.collect()
        self._flying.append((unit, *unit.reduce(self._op)))
