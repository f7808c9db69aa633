"""Stock FSDP2, a unit a layer, with its own collectives or with ours."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from course_lib.collectives import all_gather_ring, reduce_scatter_ring, segments


class _Allocates:
    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)


class RingAllGather(_Allocates, AllGather):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return all_gather_ring(output_tensor, group, async_op=async_op)  # the input is this rank's segment of it


class RingReduceScatter(_Allocates, ReduceScatter):
    """FSDP2 reads the output when this returns, so it waits."""

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        reduce_scatter_ring(input_tensor, group, op="mean" if op == dist.ReduceOp.AVG else "sum")
        output_tensor.copy_(segments(input_tensor, group.size())[group.rank()])


def fsdp2(model: nn.Sequential, prefetch: int = 1, our_collectives: bool = False) -> nn.Module:
    """Each child of `model` a unit, gathered `prefetch` ahead without blocking, as in `Sharded`."""
    mesh, layers = init_device_mesh("cpu", (dist.get_world_size(),)), list(model)
    parts = [fully_shard(part, mesh=mesh) for part in (*layers, model)]
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1:i + 1 + prefetch])
        layer.set_modules_to_backward_prefetch(layers[max(0, i - prefetch):i][::-1])
    for part in layers if our_collectives else ():
        part.set_custom_all_gather(RingAllGather())
        part.set_custom_reduce_scatter(RingReduceScatter())
    model._set_unshard_async_op(True)
    return parts[-1]
