"""The rank's side of the workbench: the learner's pieces between a model that computes and a wire that carries.

Whatever the pieces do wrong is a `Fault`: one sentence with the rank, the method and what happened. No
wait is endless: calls and handles have a time limit of their own, shorter than the run's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_lib import record
from course_lib.lab.guard import Broke, TookTooLong, call, time_limit
from course_lib.lab.workbench.gradients import loss_of, without


class Fault(Exception):
    """What a learner's piece did wrong on a rank, as a sentence."""


class Refused(Exception):
    """The wire does not do what a piece asked for. Its text continues "rank 0: finish …"."""


class BenchWork:
    """The handle of a bucket on its way."""

    def __init__(self, wire: BenchWire, bucket: int, work: dist.Work) -> None:
        self._wire, self._bucket, self._work = wire, bucket, work
        self._version = wire.memory[bucket]._version
        self.waited = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the bucket holds the sum over ranks."""
        self._wire.waits_in_backward += self._wire.in_backward
        if self._wire.memory[self._bucket]._version != self._version and not self.waited:
            raise Refused(f"changed bucket {self._bucket} between its launch and its wait(); wait first")
        self._work.wait(timeout or timedelta(seconds=self._wire.limit_s))
        self.waited = True
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed() and self.wait()


class BenchWire:
    """What a reducer sees of the wire: `ranks`, `flat[b]`, `views[id]` and `launch(b)`."""

    def __init__(self, params: Sequence[nn.Parameter], buckets: Sequence[Sequence[int]], limit_s: float) -> None:
        self.ranks, self.limit_s = dist.get_world_size(), limit_s
        self.memory = [torch.zeros(sum(params[i].numel() for i in b), dtype=params[b[0]].dtype) for b in buckets]
        self.flat, self.views = list(self.memory), {}
        for flat, bucket in zip(self.memory, buckets):
            for index, part in zip(bucket, flat.split([params[i].numel() for i in bucket])):
                self.views[index] = part.view(params[index].shape)
        self.works: list[BenchWork] = []
        self.in_backward, self.waits_in_backward = False, 0

    def launch(self, bucket: int) -> BenchWork:
        """Start the sum of `flat[bucket]` over all ranks and return at once. Bucket 0 first, then 1, then 2."""
        due = len(self.works)
        if bucket not in range(len(self.memory)):
            raise Refused(f"launched {bucket!r}; launch takes the number of a bucket, 0 to {len(self.memory) - 1}")
        if bucket < due:
            raise Refused(f"launched bucket {bucket} a second time; the other ranks do not expect it again")
        if bucket > due:
            raise Refused(f"launched bucket {bucket} before bucket {due}; every rank sends in the order of the list")
        with record.tag(bucket):
            work = dist.all_reduce(self.memory[bucket], async_op=True)
        self.works.append(BenchWork(self, bucket, work))
        return self.works[-1]


class Bench:
    """One rank's model, wire and reducer. `window()` is one update without its optimizer step."""

    def __init__(self, model: nn.Sequential, assign: Callable, reducer: type, cap_bytes: float, reverse: bool,
                 finish: bool, micro_steps: int, limit_s: float) -> None:
        self.model, self.micro_steps, self.limit_s, self.finish = model, micro_steps, limit_s, finish
        self.rank, self.windows, self._class = dist.get_rank(), 0, reducer
        self.params = list(model.parameters())
        self.buckets = self._assigned(assign, cap_bytes)
        if not reverse:  # the same buckets from the other end: those of the first layers come first
            self.buckets = [bucket[::-1] for bucket in reversed(self.buckets)]
        self.bucket_of = {index: b for b, bucket in enumerate(self.buckets) for index in bucket}
        self.wire = BenchWire(self.params, self.buckets, limit_s)
        self.reducer = self._new_reducer()
        self._ready: dict[int, int] = {}
        for index, param in enumerate(self.params):
            param.register_post_accumulate_grad_hook(lambda param, index=index: self._gradient_ready(index))

    def prepare(self) -> None:
        """Before a window, off the clock. Where the learner has no `finish` yet, a new reducer stands in for it."""
        for param in self.params:
            param.grad = None
        self.wire.works, self.wire.waits_in_backward, self._ready = [], 0, {}
        if not self.finish:
            self.reducer = self._new_reducer()

    def window(self, skip: int | None = None) -> None:
        """All micro-steps, then `finish`. `skip` leaves out the layer of that number on this rank."""
        forward, self.wire.in_backward = without(self.model, skip), True
        for micro_step in range(self.micro_steps):
            loss_of(forward, self.rank, micro_step, self.micro_steps).backward()
        self.wire.in_backward = False
        self._note_fills()
        if skip is None and (here := range(len(self.wire.works), len(self.buckets))):
            later = " It did in the first window: does finish put everything back?" if self.windows else ""
            raise Fault(f"rank {self.rank}: on_gradient_ready did not launch {_names(here)}, though every gradient was "
                        f"there when backward ended.{later}")
        if self.finish:
            self._call("finish", self.reducer.finish)
            self._inspect()
        else:
            self._finish_for_them()
        self.windows += 1

    def _assigned(self, assign: Callable, cap_bytes: float) -> list[list[int]]:
        """The learner's buckets, refused unless they hold every parameter once and are the same on every rank."""
        sizes = [(index, p.numel() * p.element_size()) for index, p in enumerate(self.params)]
        found = self._call("assign_buckets", assign, list(sizes), cap_bytes)
        try:
            buckets = [[int(index) for index in bucket] for bucket in found]
        except (TypeError, ValueError):
            raise Fault(f"rank {self.rank}: assign_buckets returned {found!r}, not a list of lists of ids") from None
        flat = sorted(index for bucket in buckets for index in bucket)
        if flat != list(range(len(sizes))) or not all(buckets):
            raise Fault(f"rank {self.rank}: assign_buckets returned {buckets}; each of the ids 0 to {len(sizes) - 1} "
                        "belongs into one bucket, and no bucket is empty")
        everybody: list = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, buckets)
        for rank, other in enumerate(everybody):
            if other != everybody[0]:
                raise Fault(f"rank {rank}: assign_buckets returned {other}, but {everybody[0]} on rank 0; all ranks "
                            "need the same buckets")
        return buckets

    def _new_reducer(self) -> Any:
        uses = dict.fromkeys(range(len(self.params)), self.micro_steps)
        arguments = [[list(b) for b in self.buckets], uses, self.wire]
        if hasattr(self._class, "finish"):
            arguments.append(dict(enumerate(self.params)))
        return self._call("__init__", self._class, *arguments)

    def _gradient_ready(self, index: int) -> None:
        bucket = self.bucket_of[index]
        if bucket < len(self.wire.works):
            raise Fault(f"rank {self.rank}: on_gradient_ready launched bucket {bucket} before the gradient of "
                        f"parameter {index} was complete; it is complete at the last call for it")
        self.wire.views[index].copy_(self.params[index].grad)
        self._ready[index] = record.now()
        self._call("on_gradient_ready", self.reducer.on_gradient_ready, index)

    def _call(self, name: str, function: Callable, *arguments: Any) -> Any:
        """Call a learner's piece. Whatever it raises, and an endless loop, becomes a `Fault`."""
        try:
            with time_limit(self.limit_s):
                return call(function, *arguments, shown=f"rank {self.rank}: {name}")
        except Broke as broke:
            error = broke.__cause__
            if isinstance(error, Fault):
                raise error from None
            raise Fault(f"rank {self.rank}: {name} {error}" if isinstance(error, Refused) else str(broke)) from None
        except NotImplementedError as stub:
            raise Fault(f"rank {self.rank}: {name} is not written yet ({stub or 'NotImplementedError'})") from None
        except TookTooLong:
            raise Fault(f"rank {self.rank}: {name} was still running after {self.limit_s:.0f} s") from None

    def _inspect(self) -> None:
        """What `finish` must leave behind, as far as one look can tell. Numbers are compared later."""
        wire, returned = self.wire, f"rank {self.rank}: finish returned, but"
        if here := range(len(wire.works), len(self.buckets)):
            raise Fault(f"{returned} {_names(here)} never left; the other ranks wait for it")
        if flying := [b for b, work in enumerate(wire.works) if not work.waited]:
            raise Fault(f"{returned} nobody waited for {_names(flying)}; wait for every handle")
        memory = {flat.untyped_storage().data_ptr() for flat in wire.memory}
        for index, param in enumerate(self.params):
            if param.grad is None:
                raise Fault(f"{returned} parameter {index} has no .grad; other ranks used it, and step on their mean")
            if param.grad.untyped_storage().data_ptr() in memory:
                raise Fault(f"{returned} .grad of parameter {index} lies in bucket {self.bucket_of[index]}, which the "
                            "next window overwrites")

    def _finish_for_them(self) -> None:
        for work in self.wire.works:
            self._call("on_gradient_ready", work.wait)
        for index, view in self.wire.views.items():
            self.params[index].grad = view / self.wire.ranks

    def _note_fills(self) -> None:
        if (recorder := record.active()) is None:
            return
        for b, bucket in enumerate(self.buckets):
            if times := [self._ready[index] for index in bucket if index in self._ready]:
                flat = self.wire.memory[b]
                recorder.add("fill", "bucket", f"bucket {b}", min(times), max(times), flat.nbytes, b)


def _names(buckets: Sequence[int]) -> str:
    return f"bucket{'s' if len(buckets) > 1 else ''} {', '.join(map(str, buckets))}"
