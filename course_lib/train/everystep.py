"""Every micro-step's gradient on the wire, under the next micro-step's compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from course_lib.train.bucketed import Bucketed
from course_lib.train.hooks import Slot
from course_lib.train.reducer import Reducer
from course_lib.train.status import Call


class EveryStep(Bucketed):
    """`Bucketed` that does not wait between micro-steps: while the buckets of micro-step i travel, micro-step i+1
    computes and accumulates into a second set of buckets.

    Even and odd micro-steps have a set each, so a set on the wire is never accumulated into. It is waited for
    when the forward two micro-steps later begins, accumulated onto, and sent again, which adds only what is new;
    `finish_gradient_synchronization()` waits for both sets and adds them up. The gradient therefore takes twice
    its memory, and N micro-steps send N times the bytes of one. At each such forward the ranks compare notes, a few
    bytes off the wire, so none is ever more than one micro-step ahead.

    Micro-steps whose forward ran under `no_sync()` send nothing: their gradient travels with that of the next
    micro-step outside. With all but the last inside, this is `Bucketed`. A gradient that `zero_grad()` drops between
    two micro-steps, the model's or an optimizer's, is dropped in both sets. There is no `comm_hook`, because a gradient
    may travel more than once.
    """

    def __init__(self, module: nn.Module, bucket_mb: float = 25.0, first_bucket_mb: float | None = 1.0,
                 plan: Sequence[Sequence[str]] | None = None, find_unused: bool = False, rebuild: bool = True,
                 op: str = "mean", process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(module, bucket_mb, first_bucket_mb, plan, find_unused=find_unused, rebuild=rebuild, op=op,
                         process_group=process_group)
        scale = 1 / self.control.size if op == "mean" else None
        self._resting = Reducer([s.param for s in self.slots], self.group, scale)
        self._forget_resting()
        self._lay_out_resting()

    def _swap(self) -> None:
        """Exchange the two sets: their buckets, what `.grad` is in each, and which of it is a sum already."""
        self.reducer, self._resting = self._resting, self.reducer
        self._reduced, self._resting_reduced = self._resting_reduced, self._reduced
        for i, slot in enumerate(self.slots):
            slot.param.grad, self._resting_grads[i] = self._resting_grads[i], slot.param.grad

    def _forget_resting(self) -> None:
        self._resting_grads: list[torch.Tensor | None] = [None] * len(self.slots)
        self._resting_reduced = 0
        self._noted: list[torch.Tensor | None] = [None] * len(self.slots)
        self._expected: list[int] = [0] * len(self.slots)
        self._changed = False  # one of the sets was changed by the training loop, and should be in both

    def _lay_out_resting(self) -> None:
        self._swap()  # laying out moves what is in `.grad`, and that belongs to the other set
        self.reducer.lay_out(self._resting.assignment)
        self._swap()

    def _arrive(self) -> None:
        """Wait for the present set if it is on the wire; `.grad` is then what arrived."""
        if self.reducer.flying:
            self.reducer.wait()
            self.reducer.deliver([bool(self._union & slot.bit) for slot in self.slots])
            if self.op == "sum":
                self._reduced = self._all

    def _note(self) -> None:
        """Remember what `.grad` is, so that it is missed when it was dropped. Where only the other set has a gradient
        it is zeros here, because None could not be dropped."""
        for slot, other, view in zip(self.slots, self._resting_grads, self.reducer.views()):
            if slot.param.grad is None and other is not None:
                slot.param.grad = view.zero_()
        self._noted = [slot.param.grad for slot in self.slots]
        self._expected = [0 if grad is None else grad._version + 1 + (self._reduced >> i & 1)
                          for i, grad in enumerate(self._noted)]  # the version when the next gradient has been added

    def _drop(self) -> None:
        """What the training loop has dropped here goes from the other set too."""
        for i, slot in enumerate(self.slots):
            if slot.param.grad is None and self._noted[i] is not None:
                self._resting_grads[i] = None

    # what happens when

    def _before_forward(self) -> None:
        self._drop()
        if self.reducer.flying and not self.progress.in_backward:
            self._agree(Call.SYNC)
            self._swap()
            self._arrive()
        super()._before_forward()
        self._note()

    def _gradient_ready(self, slot: Slot) -> None:
        noted, grad, resting = self._noted[slot.index], slot.param.grad, self._resting_grads[slot.index]
        if noted is not None and grad is not noted:
            self._resting_grads[slot.index] = None  # it was dropped after the forward
        elif noted is not None and resting is not None and grad._version > self._expected[slot.index]:
            self._changed = True
        super()._gradient_ready(slot)
        self._noted[slot.index] = slot.param.grad

    def _touched(self) -> bool:
        return self._changed or super()._touched()

    def _complete(self) -> None:
        self._drop()
        if not self.reducer.flying:  # a forward without a backward came last, and swapped for nothing
            self._swap()
        for _ in range(2):
            self._arrive()
            self._swap()
        for slot, other in zip(self.slots, self._resting_grads):
            if slot.param.grad is None:
                slot.param.grad = other
            elif other is not None:
                slot.param.grad.add_(other)
        self._forget_resting()

    def _rebuild(self) -> None:
        super()._rebuild()
        self._lay_out_resting()

    def _drain(self, launched: int) -> None:
        super()._drain(launched)  # only the present set can differ between ranks: they agreed on the other one
        self._resting.wait()
        self._forget_resting()
