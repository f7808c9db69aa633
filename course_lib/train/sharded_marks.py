"""What `.grad` of a sharded model is while the gradient is not there: a mark, that is refused to who reads it and whose
absence says that the training loop has dropped the gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from course_lib.train.hooks import Slot
from course_lib.train.sharded_unit import Elsewhere, Unit
from course_lib.train.unreadable import Unreadable


class Unfinished(Unreadable):
    """In a shard, between the first backward pass of a window and its end."""

    reason = ("the gradient of this window is not complete, and not on its rank; clip, unscale and read it after "
              "finish_gradient_synchronization()")


class Marks:
    """Sets marks in the parameters of `units` and in their shards, and finds those that are gone."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._marked = 0  # parameters that are still to be looked at for what became of their marks
        self._elsewhere: dict[tuple[int, torch.Size], Elsewhere] = {}  # made once, for each shape of a parameter
        self._unfinished = {id(piece): Unfinished.in_place_of(piece) for _, piece in self._pairs()}

    def set(self) -> None:
        """A backward pass is over. Also where this rank has no gradient: another may have sent one to its shard."""
        for slot, piece in self._pairs():
            self._lead_on(slot)
            if piece.grad is None:
                piece.grad = self._unfinished[id(piece)]
            self._marked |= slot.bit

    def dropped(self) -> Iterator[tuple[Unit, int, bool]]:
        """Unit and place of each parameter whose gradient was dropped since the marks were set, or zeroed, and which of
        the two. Each is told once."""
        for unit in self._units:
            for k, (slot, piece) in enumerate(zip(unit.slots, unit.pieces)):
                zeroed = isinstance(piece.grad, Unfinished) and piece.grad.zeroed
                if zeroed:
                    piece.grad.zeroed = False
                if zeroed or (self._marked & slot.bit and piece.grad is None):
                    self._marked &= ~slot.bit
                    yield unit, k, zeroed

    def clear(self) -> None:
        """The shards' marks go: the window is over."""
        self._marked = 0
        for _, piece in self._pairs():
            if isinstance(piece.grad, Unfinished):
                piece.grad = None

    def lead_on(self) -> None:
        """The shards have the window's gradients: say so to who looks for them in the parameters."""
        for slot, piece in self._pairs():
            if piece.grad is not None:
                self._lead_on(slot)

    def _lead_on(self, slot: Slot) -> None:
        key = slot.index, slot.param.shape
        if key not in self._elsewhere:
            self._elsewhere[key] = Elsewhere.in_place_of(slot.param)
        slot.param.grad = self._elsewhere[key]

    def _pairs(self) -> Iterator[tuple[Slot, nn.Parameter]]:
        for unit in self._units:
            yield from zip(unit.slots, unit.pieces)
