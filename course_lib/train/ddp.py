"""Stock `DistributedDataParallel` behind the same interface, and the table of all strategies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib.train.broadcast import broadcast_module
from course_lib.train.bucketed import Bucketed
from course_lib.train.delayed import Delayed
from course_lib.train.diloco import DiLoCo
from course_lib.train.everystep import EveryStep
from course_lib.train.local_sgd import LocalSGD
from course_lib.train.nosync import NoSync
from course_lib.train.reducer import CommHook
from course_lib.train.serial import SerialAllReduce
from course_lib.train.sharded import Sharded
from course_lib.train.stepping import StepPerBucket

_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters


class StockDDP(DistributedDataParallel):
    """PyTorch's DDP, taking the arguments of `Bucketed`. It finishes inside `backward()`, so
    `finish_gradient_synchronization()` has nothing to do, and it checks nothing there.

    `bucket_mb=25, first_bucket_mb=1` are DDP's defaults. Any other small first bucket, or a list of caps as
    `bucket_caps_mb`, needs torch 2.13; before it a `ValueError` says so. Buffers are not broadcast again in
    every forward, as with the other strategies.
    """

    def __init__(self, module: nn.Module, bucket_mb: float = 25.0, first_bucket_mb: float | None = 1.0,
                 bucket_caps_mb: Sequence[float] | None = None, gradient_as_bucket_view: bool = True,
                 find_unused: bool = False, comm_hook: CommHook | None = None, hook_state: Any = None,
                 op: str = "mean", process_group: dist.ProcessGroup | None = None) -> None:
        if op not in ("mean", "sum"):
            raise ValueError(f"op={op!r}: choose 'mean' or 'sum'")
        if op == "sum" and comm_hook is not None:
            raise ValueError("op='sum' and a comm_hook: the hook alone decides how gradients are combined; drop one")
        caps = _caps(bucket_mb, first_bucket_mb, bucket_caps_mb)
        if "forward_sync_buffers" in _ARGUMENTS:
            buffers = {"forward_sync_buffers": False}
        else:  # before torch 2.13 the only switch also turned off the broadcast at the start
            buffers = {"broadcast_buffers": False}
            broadcast_module(module, dist.group.WORLD if process_group is None else process_group)
        super().__init__(module, process_group=process_group, find_unused_parameters=find_unused,
                         gradient_as_bucket_view=gradient_as_bucket_view, **caps, **buffers)
        if comm_hook is not None:
            self.register_comm_hook(hook_state, comm_hook)
        elif op == "sum":
            self.register_comm_hook(self.process_group, _sum_hook)

    def finish_gradient_synchronization(self) -> None:
        """Nothing is left to do: DDP waits for its buckets at the end of `backward()`."""


def takes_caps() -> bool:
    """Whether this torch's DDP takes a cap for every bucket, as it does from 2.13 on."""
    return "bucket_cap_mb_list" in _ARGUMENTS


def _caps(bucket_mb: float, first_bucket_mb: float | None, bucket_caps_mb: Sequence[float] | None) -> dict[str, Any]:
    """DDP's arguments for a bucket layout."""
    if bucket_caps_mb is None and first_bucket_mb is None:
        return {"bucket_cap_mb": bucket_mb}
    if bucket_caps_mb is None and (bucket_mb, first_bucket_mb) == (25.0, 1.0):
        return {}
    if not takes_caps():
        raise ValueError(f"torch {torch.__version__} knows one cap for all buckets: pass first_bucket_mb=None, or "
                         "install torch 2.13 or later")
    return {"bucket_cap_mb_list": [first_bucket_mb, bucket_mb] if bucket_caps_mb is None else list(bucket_caps_mb)}


def _sum_hook(group, bucket):
    """DDP divides by the world size unless a hook takes over; this one does not. DDP refuses annotations that are
    strings, as this file's would be."""
    return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(lambda f: f.value()[0])


STRATEGIES: dict[str, Callable[..., nn.Module]] = {
    "serial": SerialAllReduce,
    "no_sync": NoSync,
    "bucketed": Bucketed,
    "ddp": StockDDP,
    "every_step": EveryStep,
    "step_per_bucket": StepPerBucket,
    "delayed": Delayed,
    "local_sgd": LocalSGD,
    "diloco": DiLoCo,
    "zero1": partial(Sharded, stage=1),
    "zero2": partial(Sharded, stage=2),
    "zero3": partial(Sharded, stage=3),
}


def wrap(strategy: str, module: nn.Module, **options: Any) -> nn.Module:
    """`module` under the strategy of that name, with the strategy's own options. Raises `ValueError` on a name
    that is not in `STRATEGIES`."""
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}: choose one of {', '.join(STRATEGIES)}")
    return STRATEGIES[strategy](module, **options)
