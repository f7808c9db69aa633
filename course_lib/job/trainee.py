"""What the loop trains: something that makes one update of a window, and can say and take over all that it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from course_lib import tensor
from course_lib.job.mesh import Mesh
from course_lib.job.options import Options
from course_lib.job.state import load_optimizer_state, optimizer_state
from course_lib.train.clip import scale_to_norm
from course_lib.train.data import Batch


class Made(NamedTuple):
    """One update. `share` is this rank's part of the window's loss: the parts of all ranks of one shard number add up
    to it. `norm` is that of the gradient before clipping."""

    share: float
    norm: float


class Trainee(ABC):
    """`params` are this rank's parameters by their names in the whole model, tied ones once. `knows_compute`: while
    somebody records, what this rank computes is recorded apart from what it waits for."""

    optimizer: torch.optim.Optimizer
    params: dict[str, nn.Parameter]
    knows_compute: bool

    def __init__(self, options: Options, mesh: Mesh) -> None:
        self.options, self.mesh = options, mesh

    @property
    def groups(self) -> list[dict[str, Any]]:
        """All parameter groups, with the hyper-parameters that were asked for."""
        return self.optimizer.param_groups

    @abstractmethod
    def update(self, window: Sequence[Batch]) -> Made:
        """Forward, backward, synchronisation, clipping, step. Collective call."""

    def finite(self) -> bool:
        """Are the parameters, as far as this rank steps on them?"""
        params = (p for group in self.groups for p in group["params"])
        return bool(torch.stack([p.detach().isfinite().all() for p in params]).all())

    def cell(self) -> dict[str, Any]:
        """What all replicas of this rank hold alike. Collective call."""
        return {"model": {name: p.detach() for name, p in self.params.items()},
                "optimizer": optimizer_state(self.params, self.optimizer)}

    def own(self) -> dict[str, Any]:
        """What only this rank holds. Empty where the run can go on without it."""
        return {}

    @torch.no_grad()
    def load(self, cell: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Take both over. Raises `ValueError` for the state of another model or rank."""
        for name, p in self.params.items():
            if name not in cell["model"] or cell["model"][name].shape != p.shape:
                raise ValueError(f"the checkpoint has no {name!r} of shape {tuple(p.shape)}")
            p.copy_(cell["model"][name])
        load_optimizer_state(self.params, self.optimizer, cell["optimizer"])

    def settle(self) -> None:
        """Do at the end of training what the strategy has put off: nothing, here. Collective call."""
        return None

    @abstractmethod
    def weights(self) -> dict[str, torch.Tensor]:
        """The whole model's state dict, the same on every rank. Collective call."""

    def clip(self, norm: torch.Tensor) -> None:
        """Scale what the optimizer steps on to the asked norm."""
        if self.options.max_norm:
            scale_to_norm([p for group in self.optimizer.param_groups for p in group["params"]], norm,
                          self.options.max_norm)


def norm_of(model: nn.Module, leave_out: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> torch.Tensor:
    """Of the gradients of part of a model (with shards or without), some left out; over all the parts in `group`."""
    kept = [p.grad for p in leave_out]
    for p in leave_out:
        p.grad = None
    square = tensor.global_norm(model).square()
    for p, grad in zip(leave_out, kept):
        p.grad = grad
    if group is not None:
        dist.all_reduce(square, group=group)
    return square.sqrt()
