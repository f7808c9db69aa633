"""The serial baseline: compute, then stand still until the gradient has been sent."""

from __future__ import annotations

from collections import defaultdict

import torch.distributed as dist
from torch import nn

from course_lib.train.base import Strategy
from course_lib.train.bucket import Bucket, factor, take_in
from course_lib.train.hooks import Slot
from course_lib.train.status import Call


class SerialAllReduce(Strategy):
    """A blocking all-reduce inside `backward()`, at its end, after every micro-step.

    One collective a parameter, or with `flat=True` one for all parameters of a dtype. A micro-step whose
    forward ran under `no_sync()` is left out and travels with the next. A parameter without a gradient
    contributes zeros, so that all ranks make the same calls. With `op="sum"`, only what was accumulated
    since the last reduction is summed.
    """

    def __init__(self, module: nn.Module, flat: bool = False, op: str = "mean",
                 process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(module, op=op, process_group=process_group)
        self.flat = flat
        # divide before the sum: half precision overflows otherwise
        self._scale = factor(1 / self.control.size if op == "mean" else None)
        self._start(flat)
        groups: dict[tuple, list[Slot]] = defaultdict(list)
        for slot in self.slots:
            groups[(slot.param.dtype, slot.param.device) if flat else slot.index].append(slot)
        self._parts = [(slots, Bucket(i, [s.param for s in slots], i == len(groups) - 1))
                       for i, slots in enumerate(groups.values())]

    def _after_synchronised_backward(self) -> None:
        self._agree(Call.SYNC)
        self._reduce()

    def _reduce(self) -> None:
        """Replace every gradient by its mean or sum over the ranks, one blocking collective after the other.
        `.grad` becomes a view into the buffer that travelled, so that the next window need not copy it there."""
        for slots, part in self._parts:
            part.hold()
            for slot, view in zip(slots, part.views):
                self.unsum(slot)
                take_in(slot.param, view, self._scale)
            if part.bytes:
                dist.all_reduce(part.flat, group=self.group)
            for slot, view in zip(slots, part.views):
                if slot.param.grad is None and self._union & slot.bit:
                    slot.param.grad = view
        if self.op == "sum":
            self._reduced = self._all
