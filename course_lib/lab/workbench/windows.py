"""The learner's `GradientSync` on real ranks and a real wire: windows of several lengths, stock DDP beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from course_lib.lab.errors import LabError
from course_lib.launch import Fabric
from course_lib.timeline import Timeline
from course_lib.tune.sweep import Measured

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Window(Measured):
    """Updates of N micro-steps that send once. `collectives` of one update, as rank 0's wire recorded them;
    `from_reference` is the largest difference of a gradient element from the mean over ranks, as a fraction of the
    largest element."""

    N: int
    from_reference: float

    @property
    def collectives(self) -> int:
        return len(self.timeline.select(rank=0, kind="comm", step=0))

    @property
    def share(self) -> float:
        """Exposed communication as a part of the step."""
        return self.exposed_s / self.median_s


def window_runs(model: Callable[[], nn.Module], GradientSync: type, Ns: Sequence[int] = (1, 2, 4, 8), *, ranks: int = 2,
                fabric: str | Fabric = "auto", repeats: int = 3, ddp: Sequence[int] = (),
                timeout_s: float = 120.0) -> dict[str, Window]:
    """Time the learner's window of each N, with one flat all-reduce at its end, and `ddp` lengths with stock DDP, all
    in alternation on the same ranks. Keys: `"N=4"`, `"DDP N=4"`.

    `model()` builds an emulated model on every rank. Raises `OwnRunFailed` with one sentence for whatever the class
    does wrong on a rank, a hang included.
    """
    from course_lib.lab.workbench.buckets import _run

    if not isinstance(GradientSync, type):
        raise LabError("window_runs: pass the class of exercise 3.1 itself.")
    rows = _run(_on_rank, model, GradientSync, tuple(Ns), tuple(ddp), repeats, ranks=ranks, fabric=fabric,
                timeout_s=timeout_s)  # fmt: skip
    worst, seconds, _ = rows[0]
    return {name: Window(name, tuple(seconds[name]), Timeline.merge(row[2][name] for row in rows), N, worst[name])
            for name, N in [*((f"N={N}", N) for N in Ns), *((f"DDP N={N}", N) for N in ddp)]}  # fmt: skip


def _on_rank(build, GradientSync, Ns, ddp, repeats):
    """The rank's side: one update of each kind is compared, then all are timed."""
    from course_lib.lab.workbench import gradients
    from course_lib.launch import context
    from course_lib.train import StockDDP, emulated
    from course_lib.tune.alternate import Step, alternate

    mine, wrapped, plain = build(), StockDDP(build()), build()
    steps, worst = {}, {}
    for name, module, N, run in [*((f"N={N}", mine, N, _learners(mine, GradientSync, N)) for N in Ns),
                                 *((f"DDP N={N}", wrapped.module, N, _stock(wrapped, N)) for N in ddp)]:
        steps[name] = Step(run, module.zero_grad)
        steps[name].prepare()
        with gradients.instant(module), gradients.instant(plain):
            run()
            worst[name] = gradients.difference(gradients.flat_gradient(module), gradients.mean_gradient(plain, N))
    provenance = f"{emulated.PROVENANCE}, {context().spec.provenance}"
    return worst, *alternate(steps, repeats, 1, provenance)


def _learners(module, GradientSync, N):
    """A window around the bare module: the learner's class is told when a forward begins and a backward has ended."""
    import torch
    import torch.distributed as dist

    from course_lib.lab.guard import Broke, call
    from course_lib.lab.workbench.gradients import loss_of
    from course_lib.lab.workbench.rank import Fault

    params, rank, ranks = list(module.parameters()), dist.get_rank(), dist.get_world_size()

    def all_reduce():
        flat = torch.cat([param.grad.flatten() for param in params])
        dist.all_reduce(flat)
        for param, part in zip(params, (flat / ranks).split([param.numel() for param in params])):
            param.grad = part.view_as(param)

    sync, broken = GradientSync(all_reduce), []

    def told(method, shown):
        try:
            call(method, shown=shown)
        except Broke as broke:
            broken.append(broke)  # on its way out it passes the learner's own block
            raise

    def micro_step(i):
        told(sync.before_forward, "before_forward()")
        loss_of(module, rank, i, N).backward()
        told(sync.after_backward, "after_backward()")

    def silent():
        for i in range(N - 1):
            micro_step(i)

    def window():
        try:
            call(sync.inside_no_sync, silent, shown="the no_sync block")
            micro_step(N - 1)
        except Broke as broke:
            raise Fault(f"rank {rank}: {[*broken, broke][0]}") from broke

    return window


def _stock(wrapped, N):
    import torch.distributed as dist

    from course_lib.lab.workbench.gradients import loss_of

    def window():
        for i in range(N):
            with wrapped.no_sync() if i < N - 1 else nullcontext():
                loss_of(wrapped, dist.get_rank(), i, N).backward()

    return window
