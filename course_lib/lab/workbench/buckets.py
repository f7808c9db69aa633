"""The learner's own reducer on real ranks, and what stock DDP really does with its bucket arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from course_lib.lab.errors import LabError, Told
from course_lib.launch import Fabric, RankDied, RankFailed, RunTimeout, run
from course_lib.timeline import Timeline
from course_lib.tune.calibrate import Load
from course_lib.tune.sweep import MB, Measured

if TYPE_CHECKING:
    from torch import nn

WARMUP = 1


class OwnRunFailed(Told):
    """The learner's pieces failed on a rank. The message says on which, in which method, and how."""


@dataclass(frozen=True)
class Own(Measured):
    """A run of the learner's reducer: seconds of each step and the timeline of all ranks, as for any `Measured`.

    `buckets` are the ids in launch order, `bucket_mb` their sizes in MB of 2**20 bytes. `from_reference` and
    `from_ddp` are the largest difference of any gradient element on any rank from the mean over ranks and
    from what stock DDP has on the same ranks, as a fraction of the largest element: 0 is the same to the bit,
    about 1e-7 is another order of adding, 1 is a sum over two ranks in place of their mean. `waits_in_backward`
    counts the waits inside the hook in one step on rank 0.
    """

    buckets: tuple[tuple[int, ...], ...]
    bucket_mb: tuple[float, ...]
    from_reference: float
    from_ddp: float
    waits_in_backward: int

    @property
    def sentence(self) -> str:
        """What came out, in a line or two."""
        step, exposed = self.median_s * 1e3, self.exposed_s * 1e3
        said = (f"{len(self.buckets)} buckets: step {step:.1f} ms, exposed {exposed:.1f} ms. Gradients differ from the "
                f"mean over ranks by at most {self.from_reference:.1g} of the largest element, from DDP's by at most "
                f"{self.from_ddp:.1g}.")  # fmt: skip
        if self.waits_in_backward:
            said += f" The hook waited {self.waits_in_backward} times in a step, and backward stood still meanwhile."
        return said


def own_run(load: Load, assign_buckets: Callable, Reducer: type, cap_mb: float, *, fabric: str | Fabric = "auto",
            ranks: int = 2, steps: int = 5, finish: bool = True, order: Literal["reverse", "forward"] = "reverse",
            micro_steps: int = 1, timeout_s: float | None = None) -> Own:  # fmt: skip
    """Run what the learner wrote in 4.1, 4.2 and 4.3 on real ranks and a real wire.

    Every rank builds `load.model()`, lets `assign_buckets` deal out its parameters at `cap_mb` MB, and makes
    a `Reducer`. `finish=False` is for the class of 4.2: the workbench waits, divides and copies itself.
    `order="forward"` sends the same buckets from the other end, those of the first layers first. With
    `finish`, one untimed window leaves a layer out on the last rank.

    Raises `OwnRunFailed` with one sentence for whatever the pieces do wrong, and `LabError` for what cannot
    be run. Nothing waits longer than `timeout_s` (by default some times what the load needs).
    """
    if order not in ("reverse", "forward"):
        raise LabError(f'own_run: order={order!r}; choose "reverse" or "forward".')
    if finish and not hasattr(Reducer, "finish"):
        raise LabError(f"own_run: {Reducer.__name__} has no method `finish`. Pass the class of exercise 4.3, or "
                       "finish=False.")  # fmt: skip
    window_s = (load.forward_ms + load.backward_ms) / 1e3 * micro_steps + 3 * load.link.cost(load.gradient_mb * MB)
    limit_s = 5 + 4 * window_s
    timeout_s = timeout_s or 10 + limit_s + 3 * (WARMUP + steps + 3) * window_s
    rows = _run(_own_on_rank, load, assign_buckets, Reducer, cap_mb * MB, steps, finish, order, micro_steps,
                min(limit_s, timeout_s / 2), ranks=ranks, fabric=fabric, timeout_s=timeout_s)  # fmt: skip
    seconds, _, buckets, sizes, *rest = rows[0]
    return Own(f"own, {cap_mb:g} MB, {order} order", tuple(seconds), Timeline.merge(row[1] for row in rows), buckets,
               tuple(size / MB for size in sizes), *rest)  # fmt: skip


def ddp_layout(model: Load | Callable[[], nn.Module], *, micro_step: Callable[[nn.Module], Any] | None = None,
               ranks: int = 2, iterations: int = 3, **ddp_kwargs: Any) -> list[list[float]]:  # fmt: skip
    """The bucket sizes that stock DDP uses in each of its first iterations, in MB, in the order of their launch.

    A comm hook writes them down; nothing is sent. `model` is a `Load` or builds the module on a rank;
    `micro_step(module)` runs a forward and returns the loss (default: ones through the first linear layer's
    width). `ddp_kwargs` go to `DistributedDataParallel`, for instance `bucket_cap_mb=25`. Raises `LabError`
    for an argument that this version of torch does not know.
    """
    from torch.nn.parallel import DistributedDataParallel

    known = inspect.signature(DistributedDataParallel).parameters
    if unknown := [name for name in ddp_kwargs if name not in known]:
        raise LabError(f"ddp_layout: DistributedDataParallel takes no {unknown[0]!r}. It takes {', '.join(known)}.")
    build = model.model if isinstance(model, Load) else model
    return run(_layout_on_rank, build, micro_step or _ones, iterations, ddp_kwargs, ranks=ranks, fabric="loopback",
               timeout_s=60)[0]  # fmt: skip


def _run(function: Callable, *arguments: Any, **where: Any) -> list:
    """`run`, with what the learner's pieces did told in one sentence."""
    from course_lib.lab.workbench.rank import Fault

    try:
        return run(function, *arguments, **where)
    except RankFailed as failed:
        if not isinstance(failed.cause, Fault):
            raise
        raise OwnRunFailed(str(failed.cause)) from None
    except RunTimeout as stuck:
        lines = re.split(r"\nrank \d+ stands at:", str(stuck))[0].splitlines()
        raise OwnRunFailed(f"The ranks did not come to an end: {' '.join(lines)}") from stuck
    except RankDied as died:
        raise OwnRunFailed(str(died)) from died
    except Fault as fault:  # under torchrun the function runs in this process
        raise OwnRunFailed(str(fault)) from None


def _own_on_rank(load, assign, reducer, cap_bytes, steps, finish, order, micro_steps, limit_s):
    """The rank's side of `own_run`: windows that are compared, then windows that are timed, then a last look."""
    import torch.distributed as dist

    from course_lib.lab.workbench import gradients
    from course_lib.lab.workbench.rank import Bench
    from course_lib.launch import context
    from course_lib.train import emulated
    from course_lib.tune.alternate import Step, alternate

    model, plain = load.model(), load.model()
    last = len(model) - 1 if dist.get_rank() == dist.get_world_size() - 1 else None
    bench = Bench(model, assign, reducer, cap_bytes, order == "reverse", finish, micro_steps, limit_s)
    with gradients.instant(model), gradients.instant(plain):
        mean = gradients.mean_gradient(plain, micro_steps)
        windows = [(None, mean)]
        if finish and len(model) > 1:  # one in which the last rank does not use the last layer, and one after it
            windows += [(last, gradients.mean_gradient(plain, micro_steps, last)), (None, mean)]
        worst = []
        for skip, right in windows:
            bench.prepare()
            bench.window(skip)
            worst.append(gradients.difference(gradients.flat_gradient(model), right))
            if worst[-1] > 1e-3:
                break  # wrong in the plain case: that is what the learner should look at first
        ddp = gradients.ddp_gradient(plain, micro_steps)
    provenance = f"{emulated.PROVENANCE}, {context().spec.provenance}"
    seconds, lines = alternate({"own": Step(bench.window, bench.prepare)}, steps, WARMUP, provenance)
    found = gradients.flat_gradient(model)
    worst.append(gradients.difference(found, mean))
    sizes = tuple(flat.nbytes for flat in bench.wire.memory)
    buckets = tuple(tuple(bucket) for bucket in bench.buckets)
    waits = bench.wire.waits_in_backward
    return seconds["own"], lines["own"], buckets, sizes, max(worst), gradients.difference(found, ddp), waits


def _layout_on_rank(build, micro_step, iterations, ddp_kwargs):
    """The rank's side of `ddp_layout`."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from course_lib.lab.workbench.gradients import instant
    from course_lib.train.emulated import Emulated

    module, seen = build(), []

    def note(state, bucket):
        seen[-1].append(round(bucket.buffer().nbytes / MB, 2))
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp = DistributedDataParallel(module, **ddp_kwargs)
    ddp.register_comm_hook(None, note)
    with instant(module) if isinstance(module, Emulated) else nullcontext():
        for _ in range(iterations):
            seen.append([])
            micro_step(ddp).backward()
    return seen


def _ones(module):
    """A loss of some kind: ones through a model that begins with a linear layer, or an emulated one."""
    import torch

    width = next((m.in_features for m in module.modules() if isinstance(m, torch.nn.Linear)), 4)
    return module(torch.ones(2, width)).square().mean()
