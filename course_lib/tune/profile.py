"""One measured run of a model: when each gradient is ready, and how long forward and backward take."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_lib.launch import control_group
from course_lib.record import now
from course_lib.simulate.buckets import GradientProfile


def gradient_profile(module: nn.Module, micro_step: Callable[[nn.Module], Any], repeats: int = 7,
                     micro_steps: int = 1) -> GradientProfile:
    """Profile `module` on every rank of a run, without communication. Collective call; all ranks get the same.

    `micro_step(module)` runs one forward and returns the loss. Times are medians over `repeats` on each
    rank, then the maximum over ranks, because a bucket leaves when the slowest rank has it. Raises
    `ValueError` if no parameter requires a gradient or one got none.
    """
    params = {p: name for name, p in module.named_parameters() if p.requires_grad and p.numel()}
    if not params:
        raise ValueError("no parameter of the model requires a gradient: nothing to reduce, nothing to tune")
    ready: dict[nn.Parameter, list[int]] = {p: [] for p in params}
    forward, backward = [], []
    handles = [p.register_post_accumulate_grad_hook(lambda p: ready[p].append(now())) for p in params]
    try:
        for _ in range(repeats + 1):
            module.zero_grad(set_to_none=False)
            dist.barrier(control_group())
            begin = now()
            loss = micro_step(module)
            middle = now()
            loss.backward()
            end = now()
            missing = [params[p] for p in params if len(ready[p]) <= len(forward)]
            if missing:
                raise ValueError(f"no gradient reached {', '.join(missing[:3])}: freeze what is unused before tuning")
            for p in params:
                ready[p][len(forward):] = [ready[p][-1] - middle]
            forward.append(middle - begin)
            backward.append(end - middle)
    finally:
        for handle in handles:
            handle.remove()
        module.zero_grad()
    times = torch.tensor([statistics.median(r[1:]) for r in (*ready.values(), forward, backward)], dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=control_group())
    *ready_s, tf, tb = (times * 1e-9).tolist()
    sizes = [p.numel() * p.element_size() for p in params]
    return GradientProfile.sorted(list(params.values()), sizes, ready_s, tf, tb, N=micro_steps)
