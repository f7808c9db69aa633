"""What the gradients of the workbench must be: the same micro-steps without buckets, and with stock DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from course_lib.launch import control_group
from course_lib.train.ddp import StockDDP


def loss_of(forward: Callable, rank: int, micro_step: int, micro_steps: int) -> torch.Tensor:
    """The loss of one micro-step. Its data differ between ranks and micro-steps, or a missing sum would not show."""
    return forward(torch.full((4,), 1.0 + rank + 0.5 * micro_step)).square().mean() / micro_steps


def without(model: nn.Sequential, skip: int | None) -> Callable:
    """The forward pass of `model` that leaves the layer of this number out."""
    return nn.Sequential(*(layer for number, layer in enumerate(model) if number != skip))


@contextmanager
def instant(model: nn.Sequential) -> Iterator[None]:
    """Inside the block the emulated device needs no time."""
    times = [(layer.forward_ns, layer.backward_ns) for layer in model]
    for layer in model:
        layer.forward_ns = layer.backward_ns = 0
    yield
    for layer, (forward_ns, backward_ns) in zip(model, times):
        layer.forward_ns, layer.backward_ns = forward_ns, backward_ns


@contextmanager
def without_ties(model: nn.Module) -> Iterator[None]:
    """Inside the block the entries of a parameter's gradient differ in magnitude, each on every rank in a place of its
    own: there is one right choice of the largest, and a difference from it is a mistake and not a tie.

    An emulated layer's gradient repeats many magnitudes. For parameters of up to 2**22 entries: of more, float32 cannot
    tell all apart.
    """
    hooks = [param.register_hook(partial(_ranked, seed=n)) for n, param in enumerate(model.parameters())]
    yield
    for hook in hooks:
        hook.remove()


def _ranked(gradient: torch.Tensor, seed: int) -> torch.Tensor:
    """As large as `gradient`, and its entries are the multiples of 1/n of that, in an order drawn for the rank."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + seed)
    order = torch.randperm(gradient.numel(), generator=generator).view_as(gradient)
    sign = 1 - 2 * (order % 2)
    return ((order + 1) * sign).to(gradient.dtype) * (gradient.abs().max() / gradient.numel())


def mean_gradient(model: nn.Sequential, micro_steps: int, skip: int | None = None) -> torch.Tensor:
    """The mean over ranks of what each computes alone. A skipped layer takes part with zeros."""
    model.zero_grad()
    for micro_step in range(micro_steps):
        loss_of(without(model, skip), dist.get_rank(), micro_step, micro_steps).backward()
    total = flat_gradient(model)
    dist.all_reduce(total, group=control_group())
    return total / dist.get_world_size()


def ddp_gradient(model: nn.Sequential, micro_steps: int) -> torch.Tensor:
    """What stock DDP makes of the same micro-steps."""
    model.zero_grad()
    stock = StockDDP(model)
    with stock.no_sync():
        for micro_step in range(micro_steps - 1):
            loss_of(stock, dist.get_rank(), micro_step, micro_steps).backward()
    loss_of(stock, dist.get_rank(), micro_steps - 1, micro_steps).backward()
    return flat_gradient(model)


def flat_gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def difference(found: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference of an element, as a fraction of the largest element; the largest over all ranks."""
    worst = ((found - right).abs().max() / right.abs().max()).nan_to_num(float("inf"))
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)
