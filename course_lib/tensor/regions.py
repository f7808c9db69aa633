"""Crossing from one region of a tensor-parallel model into another: what happens forward, and its conjugate backward.

| call             | forward        | backward       | where |
|------------------|----------------|----------------|-------|
| `copy`           | nothing        | all-reduce     | replicated activations enter a column-parallel layer |
| `all_reduce`     | all-reduce     | nothing        | partial sums leave a row-parallel layer |
| `all_gather`     | all-gather     | reduce-scatter | a sequence shard enters a column-parallel layer |
| `reduce_scatter` | reduce-scatter | all-gather     | partial sums leave as a sequence shard |
| `split`          | own part       | all-gather     | replicated activations become shards |
| `collect`        | all-gather     | own part       | shards become replicated activations |

The first two are f and g of "Megatron-LM" (Shoeybi et al., 2019), the next two g and ḡ of "Reducing Activation
Recomputation in Large Transformer Models" (Korthikanti et al., 2022). A ring's all-reduce costs a rank as many bytes
as a reduce-scatter and an all-gather together, so a sequence-parallel pair moves what a tensor-parallel one does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from course_lib.tensor.collective import arrived, same_everywhere, start_gather, start_scatter
from course_lib.tensor.shard import place, share


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, there: Callable, back: Callable) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        return ctx.back(grad), None, None


def cross(x: torch.Tensor, there: Callable, back: Callable) -> torch.Tensor:
    """`there(x)`, whose gradient is `back` of what comes back, whatever `there` does."""
    return _Crossing.apply(x, there, back)


def copy(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    return cross(x, _same, partial(_summed, group=group))


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    return cross(x, partial(_summed, group=group), _same)


def all_gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    return cross(x, partial(_joined, dim=dim, group=group), partial(_summed_part, dim=dim, group=group))


def reduce_scatter(x: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    return cross(x, partial(_summed_part, dim=dim, group=group), partial(_joined, dim=dim, group=group))


def split(x: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    return cross(x, partial(_part, dim=dim, group=group), partial(_joined, dim=dim, group=group))


def collect(x: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    return cross(x, partial(_joined, dim=dim, group=group), partial(_part, dim=dim, group=group))


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def _summed(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    same_everywhere(x, group)
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _joined(x: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    same_everywhere(x, group)
    return torch.cat(arrived(start_gather(x, group)).unbind(), dim=dim)


def _summed_part(x: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    same_everywhere(x, group)
    share(x.shape[dim], group, f"dimension {dim} of the activations")
    return arrived(start_scatter(torch.stack(x.chunk(place(group)[1], dim=dim)), group))


def _part(x: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    mine, rank = share(x.shape[dim], group, f"dimension {dim} of the activations"), place(group)[0]
    return x.narrow(dim, rank * mine, mine).clone()
