"""The learner's `DoubleBuffer` on real ranks and a real wire, one object a bucket, beside the library's strategies."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from course_lib.lab.errors import LabError
from course_lib.launch import Fabric
from course_lib.timeline import Timeline
from course_lib.tune.calibrate import Load
from course_lib.tune.sweep import Measured

VARIANTS = {"once": ("bucketed", False), "EveryStep": ("every_step", True), "DDP every": ("ddp", True),
            "serial": ("no_sync", False)}
"""What runs beside the learner's: strategy, and whether every micro-step is synchronised."""


@dataclass(frozen=True)
class Sent(Measured):
    """A way of sending. `collectives` and `bytes` (handed to them) are of one update on rank 0, `overlap` is hidden
    communication over all of it, pooled. `from_reference` is the largest difference of a gradient element from the
    mean over ranks, as a fraction of the largest element."""

    from_reference: float

    @property
    def collectives(self) -> int:
        return len(self._comm())

    @property
    def bytes(self) -> int:
        return sum(span.bytes for span in self._comm())

    @property
    def overlap(self) -> float:
        from course_lib import overlap
        return overlap.report(self.timeline).pooled.overlap or 0.0

    def _comm(self) -> Timeline:
        return self.timeline.select(rank=0, kind="comm", step=0)


def every_runs(load: Load, DoubleBuffer: type, N: int, *, bucket_mb: float = 1.0, ranks: int = 2,
               fabric: str | Fabric = "auto", repeats: int = 3, timeout_s: float = 120.0) -> dict[str, Sent]:
    """Time updates of N micro-steps, in alternation on the same ranks: `"yours"` with a `DoubleBuffer` for each bucket,
    and those of `VARIANTS` with the same buckets.

    Raises `OwnRunFailed` with one sentence for whatever the class does wrong on a rank, a hang included.
    """
    from course_lib.lab.workbench.buckets import _run

    if not isinstance(DoubleBuffer, type):
        raise LabError("every_runs: pass the class of exercise 6.1 itself.")
    rows = _run(_on_rank, load, DoubleBuffer, N, bucket_mb, repeats, ranks=ranks, fabric=fabric,
                timeout_s=timeout_s)  # fmt: skip
    worst, seconds, _ = rows[0]
    return {name: Sent(name, tuple(seconds[name]), Timeline.merge(row[2][name] for row in rows), worst[name])
            for name in seconds}  # fmt: skip


def _on_rank(load, DoubleBuffer, N, bucket_mb, repeats):
    """The rank's side: every way is compared with the reference, then all are timed."""
    from contextlib import nullcontext

    import torch.distributed as dist

    from course_lib.lab.workbench import gradients
    from course_lib.launch import context
    from course_lib.train import emulated, wrap
    from course_lib.tune.alternate import Step, alternate

    rank, plain, mine = dist.get_rank(), load.model(), load.model()
    steps, modules = {"yours": Step(Yours(mine, DoubleBuffer, N, bucket_mb).window, mine.zero_grad)}, {"yours": mine}
    for name, (strategy, every) in VARIANTS.items():
        layout = {} if strategy == "no_sync" else {"bucket_mb": bucket_mb, "first_bucket_mb": None}
        wrapped = wrap(strategy, load.model(), **layout)

        def window(wrapped=wrapped, every=every):
            for i in range(N):
                with nullcontext() if every or i == N - 1 else wrapped.no_sync():
                    gradients.loss_of(wrapped, rank, i, N).backward()
            wrapped.finish_gradient_synchronization()

        modules[name] = wrapped.module
        steps[name] = Step(window, lambda wrapped=wrapped: wrapped.zero_grad(set_to_none=False))
    worst = {}
    for name, module in modules.items():
        with gradients.instant(module), gradients.instant(plain):
            steps[name].prepare()
            steps[name].run()
            found = gradients.flat_gradient(module)
            worst[name] = gradients.difference(found, gradients.mean_gradient(plain, N))
    provenance = f"{emulated.PROVENANCE}, {context().spec.provenance}"
    return worst, *alternate(steps, repeats, 1, provenance)


class BucketWire:
    """What one `DoubleBuffer` sees of the wire: the two buffers of its bucket."""

    def __init__(self, bucket: int, elements: int) -> None:
        import torch
        import torch.distributed as dist

        self.ranks, self._bucket = dist.get_world_size(), bucket
        self.buffers = [torch.zeros(elements), torch.zeros(elements)]

    def launch(self, buffer: int) -> Flight:
        """Start the sum of a buffer over all ranks and return at once."""
        import torch.distributed as dist

        from course_lib import record
        from course_lib.lab.workbench.rank import Refused

        if buffer not in (0, 1):
            raise Refused(f"launched {buffer!r}; launch takes the number of a buffer, 0 or 1")
        with record.tag(self._bucket):
            return Flight(dist.all_reduce(self.buffers[buffer], async_op=True))


class Flight:
    """The handle of a buffer on its way."""

    limit_s = 30.0

    def __init__(self, work) -> None:
        self._work = work

    def wait(self, timeout: object = None) -> bool:
        """Block until the buffer holds the sum over ranks."""
        self._work.wait(timedelta(seconds=self.limit_s))
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()


class Yours:
    """A window around the bare module: when the gradients of a bucket are there, its `DoubleBuffer` is told."""

    def __init__(self, module, DoubleBuffer, N, bucket_mb) -> None:
        import torch.distributed as dist

        from course_lib.train.assign import Gradient, assign_by_size

        self.module, self.N, self.rank, self.i = module, N, dist.get_rank(), 0
        self.params = list(module.parameters())
        listed = [Gradient(str(j), p.numel() * p.element_size(), "") for j, p in enumerate(self.params)]
        self.buckets = assign_by_size(listed, range(len(listed) - 1, -1, -1), bucket_mb, None)
        self.wires = [BucketWire(b, sum(self.params[j].numel() for j in bucket)) for b, bucket in
                      enumerate(self.buckets)]  # fmt: skip
        self.doubles = [self._call(DoubleBuffer, wire, shown="DoubleBuffer(wire)") for wire in self.wires]
        for b, bucket in enumerate(self.buckets):  # gradients come in this order, so the last one completes the bucket
            self.params[bucket[-1]].register_post_accumulate_grad_hook(lambda _, b=b: self._ready(b))

    def window(self) -> None:
        from course_lib.lab.workbench.gradients import loss_of

        for i in range(self.N):
            self.i = i
            loss_of(self.module, self.rank, i, self.N).backward()
        for bucket, double in zip(self.buckets, self.doubles):
            mean = self._call(double.finish, shown="finish()")
            parts = mean.split([self.params[j].numel() for j in bucket])
            for j, part in zip(bucket, parts):
                self.params[j].grad = part.view_as(self.params[j])

    def _ready(self, b: int) -> None:
        import torch

        params = [self.params[j] for j in self.buckets[b]]
        gradient = torch.cat([p.grad.flatten() for p in params])
        for p in params:
            p.grad = None  # the next micro-step's gradient starts from nothing: what is here is on its way
        self._call(self.doubles[b].micro_step, self.i, gradient, shown=f"micro_step({self.i}, gradient)")

    def _call(self, function, *arguments, shown):
        from course_lib.lab.guard import Broke, call
        from course_lib.lab.workbench.rank import Fault

        try:
            return call(function, *arguments, shown=shown)
        except Broke as broke:
            raise Fault(f"rank {self.rank}: {broke}") from broke
