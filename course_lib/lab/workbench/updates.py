"""Whole updates, the optimizer's step included, in alternation on real ranks: the learner's step per bucket, and any
strategy of the library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from course_lib.lab.errors import LabError
from course_lib.launch import Fabric
from course_lib.timeline import Timeline
from course_lib.tune.calibrate import Load
from course_lib.tune.sweep import Measured

LR = 1e-3
LIMIT_S = 30.0


@dataclass(frozen=True)
class Updated(Measured):
    """A way of updating. `overlap` is hidden communication over all of it, pooled. `from_serial` is the largest
    difference of a parameter element, on any rank, from one all-reduce and one optimizer step, after as many
    updates: 0 is the same to the bit. `bytes` are those that rank 0 hands to collectives in one timed step."""

    from_serial: float

    @property
    def overlap(self) -> float:
        from course_lib import overlap
        return overlap.report(self.timeline).pooled.overlap or 0.0

    @property
    def bytes(self) -> int:
        return sum(span.bytes for span in self.timeline.select(rank=0, kind="comm", step=0))


def update_runs(load: Load, variants: Mapping[str, tuple[str, Mapping[str, Any]]], own: type | None = None, *,
                bucket_mb: float = 0.5, updates: int = 1, micro_steps: int = 2, ranks: int = 2,
                fabric: str | Fabric = "auto", repeats: int = 3, timeout_s: float = 120.0) -> dict[str, Updated]:
    """Time `updates` updates of AdamW in a row, in alternation on the same ranks: `"yours"` with the class `own` of
    exercise 8.1, and each of `variants`, a strategy of `train.STRATEGIES` with its options.

    Nothing is left under way when a timed step ends: delayed gradients are applied, local parameters averaged.
    Raises `OwnRunFailed` with one sentence for whatever the class does wrong on a rank, a hang included.
    """
    from course_lib.lab.workbench.buckets import _run

    if own is not None and not isinstance(own, type):
        raise LabError("update_runs: pass the class of exercise 8.1 itself.")
    rows = _run(_on_rank, load, dict(variants), own, bucket_mb, updates, micro_steps, repeats, ranks=ranks,
                fabric=fabric, timeout_s=timeout_s)
    worst, seconds, _ = rows[0]
    return {name: Updated(name, tuple(seconds[name]), Timeline.merge(row[2][name] for row in rows), worst[name])
            for name in seconds}


def _on_rank(load, variants, own, bucket_mb, updates, micro_steps, repeats):
    """The rank's side: everything takes as many updates as the serial way, and is compared with it at the end."""
    import torch
    import torch.distributed as dist

    from course_lib.launch import context
    from course_lib.train import emulated
    from course_lib.tune.alternate import Step, alternate

    torch.set_num_threads(1)
    ways: dict[str, Any] = {"serial": Library(load, "no_sync", {}, micro_steps)}
    if own is not None:
        ways["yours"] = Yours(load, own, bucket_mb, micro_steps)
    for name, (strategy, options) in variants.items():
        ways[name] = Library(load, strategy, options, micro_steps)
    provenance = f"{emulated.PROVENANCE}, real AdamW, {context().spec.provenance}"

    def several(way):
        for _ in range(updates):
            way.update()
        way.settle()

    steps = {name: Step(lambda way=way: several(way)) for name, way in ways.items()}
    measured = alternate(steps, repeats, 1, provenance)
    right, worst = ways["serial"].parameters(), {}
    for name, way in ways.items():
        far = (way.parameters() - right).abs().max()
        dist.all_reduce(far, op=dist.ReduceOp.MAX)
        worst[name] = float(far)
    return worst, *measured


class Library:
    """A strategy of the library with AdamW."""

    def __init__(self, load, strategy, options, micro_steps) -> None:
        import torch
        import torch.distributed as dist

        from course_lib.train import wrap

        self.model, self.micro_steps, self.rank = wrap(strategy, load.model(), **options), micro_steps, dist.get_rank()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        if not getattr(self.model, "steps_itself", False):
            record_steps(self.optimizer)  # before the strategy's own hook, which may average: that is no compute
        if hasattr(self.model, "take_optimizer"):
            self.model.take_optimizer(self.optimizer)

    def update(self) -> None:
        from contextlib import nullcontext

        from course_lib.lab.workbench.gradients import loss_of

        for i in range(self.micro_steps):
            with nullcontext() if i == self.micro_steps - 1 else self.model.no_sync():
                loss_of(self.model, self.rank, i, self.micro_steps).backward()
        self.model.finish_gradient_synchronization()
        if not getattr(self.model, "steps_itself", False):
            self._step()

    def settle(self) -> None:
        from course_lib.train.delayed import Delayed

        if isinstance(self.model, Delayed):
            for _ in self.model.flush():
                self._step()

    def parameters(self):
        return _flat(self.model.parameters())

    def _step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Yours:
    """A window around the bare module. The learner's object is told when a bucket's gradients are there."""

    def __init__(self, load, own, bucket_mb, micro_steps) -> None:
        import torch
        import torch.distributed as dist

        from course_lib.train.assign import Gradient, assign_by_size

        self.module, self.micro_steps, self.rank, self.i = load.model(), micro_steps, dist.get_rank(), 0
        params = list(self.module.parameters())
        listed = [Gradient(str(j), p.numel() * p.element_size(), "") for j, p in enumerate(params)]
        buckets = [[params[j] for j in bucket] for bucket in
                   assign_by_size(listed, range(len(listed) - 1, -1, -1), bucket_mb, None)]
        self.wire = UpdateWire(buckets)
        optimizers = [BucketOptimizer(b, torch.optim.AdamW(bucket, lr=LR)) for b, bucket in enumerate(buckets)]
        self.mine = told(own, self.wire, optimizers, Constant(), shown="StepPerBucket(wire, optimizers, scheduler)")
        for b, bucket in enumerate(buckets):  # gradients come in this order, so the last one completes the bucket
            bucket[-1].register_post_accumulate_grad_hook(lambda _, b=b: self._full(b))

    def update(self) -> None:
        from course_lib.lab.workbench.gradients import loss_of

        self.wire.begin()
        for i in range(self.micro_steps):
            self.i = i
            loss_of(self.module, self.rank, i, self.micro_steps).backward()
        told(self.mine.finish, shown="finish()")

    def settle(self) -> None:
        """Nothing is put off."""

    def parameters(self):
        return _flat(self.module.parameters())

    def _full(self, b: int) -> None:
        last = self.i == self.micro_steps - 1
        told(self.mine.bucket_full, b, last, shown=f"bucket_full({b}, {last})")


class UpdateWire:
    """One flat gradient a bucket; `.grad` of its parameters lies in it."""

    def __init__(self, buckets) -> None:
        import torch

        self._flat = []
        for bucket in buckets:
            self._flat.append(torch.zeros(sum(p.numel() for p in bucket)))
            for param, part in zip(bucket, self._flat[-1].split([p.numel() for p in bucket])):
                param.grad = part.view_as(param)

    def begin(self) -> None:
        for flat in self._flat:
            flat.zero_()

    def launch(self, bucket: int) -> Flight:
        """Start the mean of a bucket's gradient over all ranks and return at once."""
        import torch.distributed as dist

        from course_lib import record
        from course_lib.lab.workbench.rank import Refused

        if bucket not in range(len(self._flat)):
            raise Refused(f"launched {bucket!r}; launch takes the number of a bucket, 0 to {len(self._flat) - 1}")
        flat = self._flat[bucket].div_(dist.get_world_size())
        with record.tag(bucket):
            return Flight(dist.all_reduce(flat, async_op=True))


class Flight:
    """The handle of a gradient on its way."""

    def __init__(self, work) -> None:
        self._work = work

    def wait(self, timeout: object = None) -> bool:
        """Block until the gradient is the mean over ranks."""
        self._work.wait(timedelta(seconds=LIMIT_S))
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()


class BucketOptimizer:
    """The optimizer of one bucket's parameters."""

    def __init__(self, bucket: int, optimizer) -> None:
        self._optimizer = optimizer
        record_steps(optimizer, f"optimizer, bucket {bucket}", bucket)

    def step(self) -> None:
        self._optimizer.step()


class Constant:
    """A scheduler that leaves the learning rate alone."""

    def step(self) -> None:
        """Called once an update."""


def told(function, *arguments, shown):
    """Call a learner's piece on a rank. What it raises becomes a `Fault` that names the rank and the call."""
    import torch.distributed as dist

    from course_lib.lab.guard import Broke, call
    from course_lib.lab.workbench.rank import Fault

    try:
        return call(function, *arguments, shown=shown)
    except Broke as broke:
        raise Fault(f"rank {dist.get_rank()}: {broke}") from broke


def record_steps(optimizer, name: str = "optimizer", bucket: int = -1) -> None:
    """Every step of `optimizer` is a compute span."""
    from course_lib import record

    begun: list[int] = []

    def end(*_: Any) -> None:
        begin = begun.pop()
        if (recorder := record.active()) is not None:
            recorder.add("compute", "compute", name, begin, record.now(), bucket=bucket)

    optimizer.register_step_pre_hook(lambda *_: begun.append(record.now()))
    optimizer.register_step_post_hook(end)


def _flat(params):
    import torch
    return torch.cat([p.detach().flatten() for p in params])
