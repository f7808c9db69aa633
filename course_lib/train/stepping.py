"""The optimizer's step bucket by bucket: what has arrived is updated while the rest is still on the wire."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import optim

from course_lib import record
from course_lib.record import now
from course_lib.train.bucket import Bucket
from course_lib.train.bucketed import Bucketed
from course_lib.train.control import SynchronizationError
from course_lib.train.unreadable import Unreadable

PER_PARAMETER = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop)
"""Optimizers that update each parameter from its own gradient and its own state, and from nothing else."""

TOO_LATE = ("clipping by the global norm, a gradient scaler's overflow check and skipping a step on NaN need every "
            "gradient before the first parameter changes, but StepPerBucket updates each bucket as it arrives; use "
            "Bucketed and optimizer.step()")


class StepPerBucket(Bucketed):
    """`Bucketed` that takes the optimizer over: `finish_gradient_synchronization()` updates the parameters of each
    bucket when its gradient is there, while those after it travel. Only the last bucket's step is exposed.

        model = StepPerBucket(module, bucket_mb=4)
        optimizer = AdamW(model.parameters())
        model.take_optimizer(optimizer)
        accumulate(model, window, loss_of, counts=counts)    # ends with the update; no optimizer.step()
        scheduler.step()                                     # once an update

    No update before all ranks agree that the window is whole, so a failed window changes nothing anywhere, no
    parameter changes while backward may still use it, and a tied one changes after all its uses.
    The result is that of the plain step to the bit: each element sees the same operations in the same order.

    After the update a gradient is spent: reading or changing it is a `RuntimeError` that says why, which
    is what clipping, a `GradScaler` or a NaN check run into. The next forward drops it, as `zero_grad()` does.
    """

    steps_itself = True
    """The update is made in `finish_gradient_synchronization()`; a training loop leaves out `optimizer.step()`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """The arguments of `Bucketed`, without `gradient_as_bucket_view`."""
        if "gradient_as_bucket_view" in options:
            raise ValueError("StepPerBucket updates from the buckets themselves: leave out gradient_as_bucket_view")
        super().__init__(*args, **options)
        self._optimizers: tuple[optim.Optimizer, ...] = ()
        self._stepping = False

    def take_optimizer(self, *optimizers: optim.Optimizer) -> None:
        """Update with these from now on, parameter groups, their hyper-parameters and schedulers included. Raises
        `ValueError` for an optimizer that does not update each parameter by itself, or that holds parameters
        without a bucket."""
        for optimizer in optimizers:
            name = type(optimizer).__name__
            if type(optimizer) not in PER_PARAMETER:
                raise ValueError(f"{name} is not known to update each parameter by itself; StepPerBucket takes "
                                 f"{', '.join(kind.__name__ for kind in PER_PARAMETER)}")
            for param in (p for group in optimizer.param_groups for p in group["params"]):
                if id(param) not in self.ids:
                    raise ValueError(f"{name} holds a parameter of shape {tuple(param.shape)} that is not in a bucket "
                                     "of this model; give it the trainable parameters of the wrapped module")
        self._optimizers = optimizers

    def before_step(self, optimizer: optim.Optimizer) -> None:
        if not self._stepping:
            raise RuntimeError("leave out optimizer.step(), and a scaler's: "
                               "finish_gradient_synchronization() has made the update; " + TOO_LATE)

    def _before_forward(self) -> None:
        if not self._optimizers:
            raise RuntimeError("StepPerBucket has no optimizer: call take_optimizer(optimizer) before a forward")
        for optimizer in self._optimizers:
            if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
                raise RuntimeError(f"the step hooks of {type(optimizer).__name__} would run once for each bucket, when "
                                   "others have not arrived: remove them; " + TOO_LATE)
        for slot in self.slots:
            if isinstance(slot.param.grad, Spent):
                slot.param.grad = None
        super()._before_forward()

    def _finish(self) -> None:
        self.reducer.deliver([bool(self._union & slot.bit) for slot in self.slots])
        waiting = {bucket.order: bucket for bucket in self.reducer.buckets}
        try:
            for bucket in self.reducer.arrivals():
                self._step(bucket)
                del waiting[bucket.order]
            for bucket in waiting.values():  # without elements, or waited for by a forward that came after
                self._step(bucket)
        except Exception as error:
            raise SynchronizationError(
                f"rank {dist.get_rank()}, window {self.window}: {len(self.reducer.buckets) - len(waiting)} of "
                f"{len(self.reducer.buckets)} buckets were updated, then {type(error).__name__}: {error}. The ranks' "
                "parameters may differ now: load the last checkpoint on all of them") from error
        self.steps += 1
        if self._observe:
            self._rebuild()
        for slot in self.slots:
            if slot.param.grad is not None:
                slot.param.grad = torch.Tensor._make_subclass(Spent, slot.param.grad)
        self._reduced = 0

    def _step(self, bucket: Bucket) -> None:
        begin, mine = now(), {id(param) for param in bucket.parameters()}
        self._stepping = True
        try:
            for optimizer in self._optimizers:
                with only(optimizer, mine):
                    optimizer.step()
        finally:
            self._stepping = False
        if (recorder := record.active()) is not None:
            recorder.add("compute", "compute", f"optimizer, bucket {bucket.order}", begin, now(), bucket=bucket.order)


@contextmanager
def only(optimizer: optim.Optimizer, ids: Collection[int]) -> Iterator[None]:
    """Inside the block, `optimizer` holds just those of its parameters whose `id` is in `ids`, each in its group."""
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    for group, params in groups:
        group["params"] = [param for param in params if id(param) in ids]
    try:
        yield
    finally:
        for group, params in groups:
            group["params"] = params


class Spent(Unreadable):
    """A gradient that the update has used up."""

    reason = "this gradient has been applied already; " + TOO_LATE
