"""What a tensor-parallel model needs between backward and the step: finished gradients, and their common norm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn


def sequence_parallel(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """Mark a module that works on each row by itself (a norm) as working on a sequence shard; returns it.

    Its computation stays as it is. Its parameters, whole on every rank, see the rows of one rank each, and so do
    their gradients: `finish_replicated_gradients` sums them.
    """
    module.group, module.shards = group, {}
    module.partial = tuple(name for name, _ in module.named_parameters(recurse=False))
    return module


def finish_replicated_gradients(model: nn.Module) -> None:
    """Sum the gradients of which each rank knows only the part of its own rows: norms, positions and the biases of
    row-parallel layers under sequence parallelism.

    Collective call, once an update: after the last backward, before the norm and the step. One all-reduce for each
    dtype and group; none where there is nothing to sum.
    """
    flat: dict[tuple, list[torch.Tensor]] = {}
    for param, group in _partial(model):
        if param.grad is not None:
            flat.setdefault((param.grad.dtype, group), []).append(param.grad)
    for (_, group), grads in flat.items():
        whole = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(whole, group=group)
        for grad, summed in zip(grads, whole.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(summed.view_as(grad))


def global_norm(model: nn.Module) -> torch.Tensor:
    """The 2-norm of the whole model's gradient, the same on every rank, summed in float32 at least.

    Shards count on every rank, replicated parameters once, tied ones once. Collective call, after
    `finish_replicated_gradients`. To clip: `torch.nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)`.
    """
    groups = {id(param): module.group for module in model.modules()
              for name, param in module.named_parameters(recurse=False) if name in getattr(module, "shards", {})}
    whole, sharded = 0.0, dict.fromkeys(groups.values(), 0.0)
    for param in model.parameters():
        if param.grad is None:
            continue
        wide = torch.promote_types(param.grad.dtype, torch.float32)
        square = torch.linalg.vector_norm(param.grad, dtype=wide).square()
        if id(param) in groups:
            sharded[groups[id(param)]] += square
        else:
            whole += square
    for group, square in sharded.items():
        total = torch.as_tensor(square)
        dist.all_reduce(total, group=group)
        whole += total
    return torch.as_tensor(whole).sqrt()


def _partial(model: nn.Module) -> Iterator[tuple[nn.Parameter, dist.ProcessGroup | None]]:
    """Each parameter with a partial gradient once, with its group, in the order of the modules."""
    seen: set[int] = set()
    for module in model.modules():
        for name in getattr(module, "partial", ()):
            param = getattr(module, name)
            if param is not None and id(param) not in seen:
                seen.add(id(param))
                yield param, module.group
