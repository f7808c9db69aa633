"""Clipping by the global norm: once an update, after synchronisation, before the step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist


def global_norm(params: Iterable[torch.Tensor], shards: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The 2-norm over the gradients of all parameters together, summed in float32 at least.

    A parameter listed twice counts once. Replicated gradients are the same on all ranks, so no collective is needed.
    With `shards`, each rank holds a different part of every gradient, and Σ‖·‖² is summed over that group (a
    collective call). Raises `ValueError` where two devices are mixed.
    """
    unique = {id(param): param.grad for param in params if param.grad is not None}
    if len({grad.device for grad in unique.values()}) > 1:
        raise ValueError("the gradients lie on several devices; take the norm on each and combine the squares")
    device = next((grad.device for grad in unique.values()), torch.device("cpu"))
    total = torch.zeros((), dtype=torch.float32, device=device)
    for grad in unique.values():
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = total + torch.linalg.vector_norm(grad.detach(), dtype=wide).square()
    if shards is not None:
        dist.all_reduce(total, group=shards)
    return total.sqrt()


def clip_grad_norm(params: Iterable[torch.Tensor], max_norm: float,
                   shards: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Scale all gradients by one factor so that their global norm is at most `max_norm`; returns the norm before.

    Call it after `finish_gradient_synchronization()` and before the step: in a micro-step the sum is unfinished, and
    before synchronisation every rank would find a norm of its own. A gradient that is not finite is left as it is,
    for whoever decides about the step. Raises `ValueError` for a max_norm that is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm}: give a norm above 0")
    params = list(params)
    norm = global_norm(params, shards)
    scale_to_norm(params, norm, max_norm)
    return norm


def scale_to_norm(params: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale the gradients, whose norm is `norm`, as `clip_grad_norm` does. The host does not wait for the norm."""
    factor = torch.where((norm > max_norm) & norm.isfinite(), max_norm / norm, 1.0)
    for grad in {id(param): param.grad for param in params if param.grad is not None}.values():
        grad.mul_(factor)
