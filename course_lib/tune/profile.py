"""When each gradient of a model is ready, and how long forward and backward take."""

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


class ModelError(ValueError):
    """A model that cannot be tuned, and why, in one sentence."""


class Observer:
    """Watches micro-steps of a module that communicates nothing, on one rank. `profile()` sums them up.

    Raises `ModelError` if no parameter requires a gradient; a parameter that gets none is named by
    `micro_step`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._params = {p: name for name, p in module.named_parameters() if p.requires_grad and p.numel()}
        if not self._params:
            raise ModelError("no parameter of the model requires a gradient: nothing to reduce, nothing to tune")
        self._rows: list[list[int]] = []
        self._at: dict[nn.Parameter, int] = {}
        for p in self._params:
            p.register_post_accumulate_grad_hook(self._note)

    def _note(self, param: nn.Parameter) -> None:
        self._at[param] = now()

    def micro_step(self, forward: Callable[[], Any]) -> None:
        """`forward()` returns the loss; its backward runs here. Last use of a parameter counts."""
        self._at.clear()
        begin = now()
        loss = forward()
        middle = now()
        loss.backward()
        end = now()
        if missing := [name for p, name in self._params.items() if p not in self._at]:
            raise ModelError(_no_gradient(missing, len(self._params)))
        self._rows.append([*(self._at[p] - middle for p in self._params), middle - begin, end - middle])

    def profile(self, micro_steps: int, skip: int = 1) -> GradientProfile:
        """Medians over the micro-steps seen after the first `skip`, then the maximum over ranks, because a
        bucket leaves when the slowest rank has it. Collective call; all ranks get the same."""
        columns = zip(*self._rows[skip:])
        times = torch.tensor([statistics.median(c) for c in columns], dtype=torch.float64)
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=control_group())
        *ready_s, tf, tb = (times * 1e-9).tolist()
        sizes = [p.numel() * p.element_size() for p in self._params]
        return GradientProfile.sorted(list(self._params.values()), sizes, ready_s, tf, tb, N=micro_steps)


def _no_gradient(missing: list[str], of: int) -> str:
    if len(missing) == of:
        return "no gradient reached any parameter: the micro-step must call the module that it is given"
    return (f"no gradient reached {', '.join(missing[:3])} on rank {dist.get_rank()}: freeze what is unused before "
            "tuning")


def gradient_profile(module: nn.Module, micro_step: Callable[[nn.Module], Any], repeats: int = 7,
                     micro_steps: int = 1) -> GradientProfile:
    """Profile `module` on every rank of a run, without communication. Collective call.

    `micro_step(module)` runs one forward and returns the loss. Raises `ModelError` as `Observer` does.
    """
    observer = Observer(module)
    for _ in range(repeats + 1):
        module.zero_grad(set_to_none=False)
        dist.barrier(control_group())
        observer.micro_step(lambda: micro_step(module))
    return observer.profile(micro_steps)
