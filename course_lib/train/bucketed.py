"""Gradient buckets: each part of the gradient travels while backward computes the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn

from course_lib.train.assign import Gradient, assign_by_plan, assign_by_size
from course_lib.train.base import Strategy
from course_lib.train.control import SynchronizationError
from course_lib.train.hooks import Slot
from course_lib.train.reducer import CommHook, LateGradient, Reducer
from course_lib.train.status import Call


class Bucketed(Strategy):
    """Our reducer: post-accumulate hooks, buckets in ready order, asynchronous all-reduces.

    A bucket closes at `bucket_mb` MB (2**20 bytes; the first of each dtype at `first_bucket_mb`, None for
    no small first bucket) and leaves when it is full and all before it have left. At the start the order
    is the reverse of registration; after the first window it is what rank 0 saw (`rebuild=False` keeps the
    first). `plan` lists the buckets by parameter name instead and is never rebuilt.

    `find_unused=True` allows windows in which some rank leaves a parameter unused. Such a parameter is
    only known to be unused when backward ends, so its bucket and those after it leave late. Without it,
    an unused parameter is a `SynchronizationError` that names it.

    `comm_hook(hook_state, bucket)` has the signature of DDP's and returns a future of the final flat
    gradient, divided or not as the hook likes; `hook_state.take_back()`, if there is one, is called when what was
    sent last is dropped. With `gradient_as_bucket_view=False`, `.grad` stays apart from the buckets and is copied in
    and out. Raises `ValueError` on sizes, plans and combinations that cannot be.
    """

    def __init__(self, module: nn.Module, bucket_mb: float = 25.0, first_bucket_mb: float | None = 1.0,
                 plan: Sequence[Sequence[str]] | None = None, gradient_as_bucket_view: bool = True,
                 find_unused: bool = False, comm_hook: CommHook | None = None, hook_state: Any = None,
                 rebuild: bool = True, op: str = "mean", process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(module, op=op, process_group=process_group)
        if comm_hook is not None and op == "sum":
            raise ValueError("op='sum' and a comm_hook: the hook alone decides how gradients are combined; drop one")
        self.find_unused = find_unused
        self.bucket_mb, self.first_bucket_mb = bucket_mb, first_bucket_mb
        self._gradients = [Gradient(s.name, s.param.numel() * s.param.element_size(),
                                    f"{s.param.dtype} on {s.param.device}") for s in self.slots]
        backwards = range(len(self.slots) - 1, -1, -1)
        if plan is None:
            assignment = assign_by_size(self._gradients, backwards, bucket_mb, first_bucket_mb)
        else:
            assignment = assign_by_plan(self._gradients, plan, self._aliases())
        self._observe = rebuild and plan is None
        plain_mean = op == "mean" and comm_hook is None
        # only our own wire counts what is issued, and a hook sends when and as often as it likes
        self._counted, self._sent = comm_hook is None and hasattr(self.group, "issued"), 0
        self.reducer = Reducer([s.param for s in self.slots], self.group, 1 / self.control.size if plain_mean else None,
                               gradient_as_bucket_view, comm_hook, hook_state)
        self._start(assignment, gradient_as_bucket_view, find_unused, self._observe,
                    getattr(comm_hook, "__qualname__", comm_hook is not None))
        self.reducer.lay_out(assignment)

    @property
    def buckets(self) -> list[list[str]]:
        """Parameter names of each bucket, in launch order."""
        return [[self.slots[i].name for i in members] for members in self.reducer.assignment]

    @property
    def bucket_bytes(self) -> list[int]:
        return [bucket.bytes for bucket in self.reducer.buckets]

    def ready_times(self) -> list[tuple[str, int, int]]:
        """(parameter, gradient bytes, time on the recorder's clock in ns) of the last synchronised backward,
        in the order in which the gradients became ready on this rank."""
        rows = zip(self._gradients, self.reducer.ready_ns)
        return sorted(((g.name, g.bytes, at) for g, at in rows), key=lambda row: row[2])

    def _aliases(self) -> dict[str, str]:
        """Every other name of a tied parameter, to the name its slot has."""
        first = {id(s.param): s.name for s in self.slots}
        names = self.module.named_parameters(remove_duplicate=False)
        return {n: first[id(p)] for n, p in names if id(p) in first}

    # what happens when

    def _before_forward(self) -> None:
        if self.reducer.flying and not self.progress.in_backward:
            self._agree(Call.SYNC)
            self._complete()
        super()._before_forward()

    def _before_synchronised_backward(self) -> None:
        self.reducer.start()

    def _gradient_ready(self, slot: Slot) -> None:
        try:
            if self.progress.running:
                self._ready(slot.index)
            elif self.reducer.flying:
                raise LateGradient
        except LateGradient:
            self.progress.running = True  # this backward has spoilt what is on the wire
            raise SynchronizationError(
                f"rank {dist.get_rank()}: {slot.name!r} got another gradient while its bucket was on the wire. Add "
                "up the losses of one forward; call finish_gradient_synchronization() between two backward passes, or "
                "run the forward of all but the last under no_sync(). With checkpointing, use use_reentrant=False"
                ) from None

    def _after_synchronised_backward(self) -> None:
        """Gradients that did not come contribute what earlier micro-steps left, or zero, so that every rank
        launches every bucket. Whether they were allowed to stay away is for the verdict."""
        for i in self.reducer.missing():
            self.unsum(self.slots[i])
            self._ready(i)

    def _ready(self, index: int) -> None:
        """Note the place of each bucket that leaves: where ranks use different parameters, a bucket and a collective
        inside backward can change places on one of them, and be summed with each other in silence."""
        before = self.reducer.launched
        self.reducer.ready(index)
        if self._counted and self.reducer.launched > before:
            left = sum(1 for bucket in self.reducer.buckets[before:self.reducer.launched] if bucket.bytes)
            self._sent += left
            for _ in range(left):
                self.progress.left(self.group.issued - self._sent)

    def _complete(self) -> None:
        self.reducer.wait()
        if self.progress.seen != self._all or not self.reducer.as_view:
            self.reducer.deliver([bool(self._union >> i & 1) for i in range(len(self.slots))])
        if self.op == "sum":
            self._reduced = self._all

    def _finish(self) -> None:
        self._complete()
        if self._observe:
            self._rebuild()

    def _rebuild(self) -> None:
        """All ranks have just agreed that the window is whole: take rank 0's order for good."""
        self._observe = False
        seen = sorted(range(len(self.slots)), key=lambda i: self.reducer.ready_ns[i])
        orders = self.control.exchange(np.array(seen, np.int32).tobytes(), "the rebuild of the buckets")
        order = np.frombuffer(orders[0], np.int32).tolist()
        assignment = assign_by_size(self._gradients, order, self.bucket_mb, self.first_bucket_mb)
        if assignment != self.reducer.assignment:
            self.reducer.lay_out(assignment)

    def _launched(self) -> int:
        return self.reducer.launched

    def _touched(self) -> bool:
        return self.reducer.written_to()

    def _drain(self, launched: int) -> None:
        self.reducer.launch_up_to(launched)
        if self._counted:
            self._sent = self.group.issued
        self.reducer.wait()
        take_back = getattr(self.reducer.hook_state, "take_back", None)
        if take_back is not None and any(bucket.bytes for bucket in self.reducer.buckets[:launched]):
            take_back()
