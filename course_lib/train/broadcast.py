"""Rank 0's parameters and buffers to every rank, in a few large collectives."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn

CHUNK_BYTES = 64 * 2**20
_ALIGN = 16
"""Every tensor starts at a multiple of this in a chunk, so that any dtype can be viewed in place."""


@torch.no_grad()
def broadcast_module(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Overwrite the parameters and buffers of `module` with those of the group's first rank.

    Tensors of all dtypes travel as bytes in flat chunks of up to 64 MB, not one collective a tensor:
    each collective pays the latency of the wire. All ranks must hold the same tensors in the same order.
    """
    if dist.get_world_size(group) == 1:
        return
    by_device: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.numel():
            by_device[tensor.device].append(tensor)
    for tensors in by_device.values():
        chunk: list[torch.Tensor] = []
        for tensor in tensors:
            if chunk and sum(map(_room, chunk)) + _room(tensor) > CHUNK_BYTES:
                _broadcast(chunk, group)
                chunk = []
            chunk.append(tensor)
        _broadcast(chunk, group)


def _room(tensor: torch.Tensor) -> int:
    """Bytes in a chunk, rounded up to the alignment."""
    return -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN


def _broadcast(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.empty(sum(map(_room, tensors)), dtype=torch.uint8, device=tensors[0].device)
    views, start = [], 0
    for tensor in tensors:
        part = flat[start:start + tensor.numel() * tensor.element_size()]
        views.append(part.view(tensor.dtype).view(tensor.shape))
        start += _room(tensor)
    first = dist.get_global_rank(group, 0)
    if dist.get_rank(group) == 0:
        for tensor, view in zip(tensors, views):
            view.copy_(tensor)
    dist.broadcast(flat, first, group=group)
    if dist.get_rank(group) != 0:
        for tensor, view in zip(tensors, views):
            tensor.copy_(view)
