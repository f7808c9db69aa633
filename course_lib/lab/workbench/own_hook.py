"""A comm hook around the compressor that a learner wrote: its messages packed, sent and handed back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class OwnHook:
    """A comm hook around the learner's class: `Half` adds up on the wire, the others gather every rank's message."""

    def __init__(self, module: Any, make: Callable[[], Any]) -> None:
        import torch.distributed as dist

        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.name_of = {id(p): n for n, p in module.named_parameters()}
        self.first = self._call(make, shown="your class")
        self.fault: Exception | None = None

    def reduce(self, bucket: Any) -> Any:
        way = {"Half": self._half, "OneBit": self._one_bit, "TopK": self._top_k}[type(self.first).__name__]
        steps = way(bucket)
        return next(steps).get_future().then(lambda done: self._finish(steps, bucket, done))

    def check(self) -> None:
        """Raise what decode did wrong while nobody could be told."""
        if self.fault is not None:
            raise self.fault

    def _finish(self, steps: Any, bucket: Any, done: Any) -> Any:
        try:
            done.value()
            next(steps, None)
        except Exception as error:
            self.fault = self.fault or error
        return bucket.buffer()

    def _half(self, bucket: Any) -> Any:
        import torch.distributed as dist

        flat = bucket.buffer()
        sent = self._call(self.first.encode, flat.clone(), self.ranks, shown="Half.encode")
        yield dist.all_reduce(sent, async_op=True)
        flat.copy_(self._call(self.first.decode, sent, self.ranks, shown="Half.decode"))

    def _one_bit(self, bucket: Any) -> Any:
        import numpy as np
        import torch

        names, grads = self._parts(bucket)
        messages = [self._call(self.first.encode, n, [g.flatten().clone()], shown=f"OneBit.encode({n!r}, …)")
                    for n, g in zip(names, grads)]
        head = torch.tensor([float(scale) for scale, _ in messages]).view(torch.uint8)
        bits = [torch.from_numpy(np.packbits(positive.numpy())) for _, positive in messages]
        rows = yield from self._gathered(torch.cat([head, *bits]))
        scales = rows[:, :len(head)].contiguous().view(torch.float32)
        signs = rows[:, len(head):].split([len(b) for b in bits], dim=1)
        for i, (name, grad) in enumerate(zip(names, grads)):
            every = [(scale[i], torch.from_numpy(np.unpackbits(packed.numpy(), count=grad.numel()).astype(bool)))
                     for scale, packed in zip(scales, signs[i])]
            grad.copy_(self._call(self.first.decode, name, every, shown=f"OneBit.decode({name!r}, …)").view_as(grad))

    def _top_k(self, bucket: Any) -> Any:
        import torch

        names, grads = self._parts(bucket)
        messages = [self._call(self.first.encode, n, g.flatten().clone(), shown=f"TopK.encode({n!r}, …)")
                    for n, g in zip(names, grads)]
        counts = [len(values) for values, _ in messages]
        sent = [torch.cat([places.int() for _, places in messages]),
                torch.cat([values.float() for values, _ in messages]).view(torch.int32)]
        rows = yield from self._gathered(torch.cat(sent))
        places, values = rows[:, :sum(counts)].split(counts, 1), rows[:, sum(counts):].split(counts, 1)
        for i, (name, grad) in enumerate(zip(names, grads)):
            every = [(v.contiguous().view(torch.float32), p.long()) for v, p in zip(values[i], places[i])]
            mean = self._call(self.first.decode, name, every, grad.numel(), shown=f"TopK.decode({name!r}, …)")
            grad.copy_(mean.view_as(grad))

    def _parts(self, bucket: Any) -> tuple[list[str], list[Any]]:
        return [self.name_of[id(p)] for p in bucket.parameters()], bucket.gradients()

    def _gathered(self, sent: Any) -> Any:
        """Every rank's tensor, as rows."""
        import torch.distributed as dist

        rows = sent.new_empty(self.ranks, len(sent))
        yield dist.all_gather(list(rows), sent, async_op=True)
        return rows

    def _call(self, function: Callable, *arguments: Any, shown: str) -> Any:
        from course_lib.lab.guard import Broke, call
        from course_lib.lab.workbench.rank import Fault

        try:
            return call(function, *arguments, shown=shown)
        except Broke as broke:
            raise Fault(f"rank {self.rank}: {broke}") from broke
