"""A unit of a sharded model: the parameters that are gathered together, and whose gradient is reduced together.

Both travel as one flat tensor, cut into n segments as the ring cuts it; segment r belongs to rank r. What a rank keeps
of its segment is in float32 at least: the master weights that its optimizer steps, and the sum of gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from course_lib import record
from course_lib.collectives import segments
from course_lib.train.hooks import Slot
from course_lib.train.sharded_wire import all_gather, reduce_scatter
from course_lib.train.unreadable import Unreadable


class Elsewhere(Unreadable):
    """In a parameter, while it is not gathered: its gradient lies in the shards."""

    reason = ("the gradient of a ZeRO model lies in model.shards(), a part on every rank, and its parameters have "
              "none: clip with model.clip_grad_norm(max_norm), read and scale what the shards have")


class Unit:
    """Parameters of one dtype and device, in the order of `slots`. With `release`, the flat parameters take memory
    only while they are gathered. A parameter that is not gathered has no elements, so that a use of it is an error
    of the operator that uses it, and never a computation with old values."""

    def __init__(self, index: int, slots: Sequence[Slot], group: dist.ProcessGroup, gathering: dist.ProcessGroup,
                 release: bool) -> None:
        self.index, self.slots, self._release = index, list(slots), release
        self._group, self._gathering = group, gathering
        self.shapes = [slot.param.shape for slot in slots]
        self.sizes = [slot.param.numel() for slot in slots]
        self._flat = torch.cat([slot.param.detach().flatten() for slot in slots])
        self.wide = torch.promote_types(self._flat.dtype, torch.float32)
        self._own = self.own(self._flat)
        self._mine = list(self._ranges())
        aliases = self.wide == self._flat.dtype and not release
        self.master = self._own if aliases else self._own.to(self.wide, copy=True)
        self.pieces = [nn.Parameter(piece) for piece in self.cut(self.master)]
        self.waiting = len(self.slots)
        """Gradients of this backward pass that have not come yet."""
        self.gradient: torch.Tensor | None = None
        """The whole gradient of this rank, flat: what has not been sent yet."""
        self.sum: torch.Tensor | None = None
        """This rank's segment of the gradient, over the ranks: what has arrived in this window."""
        self.coming: dist.Work | None = None
        self.whole = True
        self.free()

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's segment of a flat tensor of the unit, as a view."""
        return segments(flat, self._group.size())[self._group.rank()]

    def cut(self, own: torch.Tensor) -> list[torch.Tensor]:
        """A tensor of this rank's segment, cut into the parts of each parameter, as views; they may be empty."""
        return list(own.split([high - low for low, high in self._mine]))

    def part(self, at: int, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor in the shape of parameter `at`, 1-D."""
        return value.flatten()[slice(*self._mine[at])]

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Which elements of each parameter lie in this rank's segment: from, to."""
        each, larger = divmod(sum(self.sizes), self._group.size())
        start = self._group.rank() * each + min(self._group.rank(), larger)
        stop = start + self._own.numel()
        for size in self.sizes:
            yield min(max(start, 0), size), min(max(stop, 0), size)
            start, stop = start - size, stop - size

    def shape(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A flat tensor of the unit as one view a parameter, in the parameter's shape."""
        return [part.view(shape) for part, shape in zip(flat.split(self.sizes), self.shapes)]

    # parameters

    def gather(self) -> bool:
        """Begin to gather, from the master weights of all ranks, unless that was done. Always into the same storage:
        what autograd saved as a view of a parameter finds its values again. Was anything issued?"""
        if self.whole or self.coming is not None:
            return False
        self._flat.untyped_storage().resize_(self._flat.numel() * self._flat.element_size())
        if self.master is not self._own:
            self._own.copy_(self.master)
        with record.tag(self.index):
            self.coming = all_gather(self._flat, self._gathering, async_op=True)
        return True

    def wait(self) -> None:
        """Until the parameters are there; only now can they be used, and be given gradients."""
        self._land()
        for slot in self.slots:
            if isinstance(slot.param.grad, Elsewhere):
                slot.param.grad = None

    def _land(self) -> None:
        if self.coming is None:
            return
        coming, self.coming = self.coming, None
        coming.wait()
        for slot, view in zip(self.slots, self.shape(self._flat)):
            slot.param.data = view
        self.whole = True

    def free(self) -> None:
        """Give the gathered parameters up. One that is on its way is waited for: its memory is still written to."""
        self._land()
        if self.whole:
            for slot in self.slots:
                slot.param.data = slot.param.data.new_empty(0)
            self.whole = False
            if self._release:
                self._flat.untyped_storage().resize_(0)

    def assemble(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Whole tensors, in the parameters' shapes, of which every rank gives its parts. Collective call."""
        flat = torch.empty(sum(self.sizes), dtype=self.wide, device=self._flat.device)
        torch.cat([piece.detach() for piece in pieces], out=self.own(flat))
        all_gather(flat, self._gathering)
        return self.shape(flat)

    # gradients

    def collect(self) -> None:
        """Move the gradients of a backward pass into the flat one, in float32 at least."""
        grads = [None if isinstance(slot.param.grad, Elsewhere) else slot.param.grad for slot in self.slots]
        if all(grad is None for grad in grads):
            return
        fresh = self.gradient is None
        if fresh:
            self.gradient = torch.empty(sum(self.sizes), dtype=self.wide, device=self._flat.device)
        for slot, grad, view in zip(self.slots, grads, self.shape(self.gradient)):
            if grad is not None:
                (view.copy_ if fresh else view.add_)(grad)
                slot.param.grad = None
            elif fresh:
                view.zero_()

    def reduce(self, op: str) -> tuple[torch.Tensor, dist.Work]:
        """Send the gradient on its way; the unit gives it away."""
        whole, self.gradient = self.gradient, None
        if whole is None:
            whole = torch.zeros(sum(self.sizes), dtype=self.wide, device=self._flat.device)
        with record.tag(self.index):
            return whole, reduce_scatter(whole, self._group, op)

    def arrived(self, whole: torch.Tensor) -> None:
        """Add this rank's segment of a reduced gradient to the sum of the window."""
        self.sum = self.own(whole).clone() if self.sum is None else self.sum.add_(self.own(whole))

    def drop(self, at: int) -> None:
        """Zero what this window has of the gradient of parameter `at`, here and, not sent yet, for other ranks."""
        if self.gradient is not None:
            self.shape(self.gradient)[at].zero_()
        if self.sum is not None:
            self.cut(self.sum)[at].zero_()
