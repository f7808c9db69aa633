"""PyTorch's FSDP2 on the same ranks, with its own collectives or with ours, and one counter of live bytes for both."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class LiveBytes(TorchDispatchMode):
    """Adds up the storages of all tensors that operators of this thread have read or made, after each operator, as long
    as they live and in the size that they have then; `peak` is the most. What a collective's own thread allocates is
    not seen, and is the same for all who use that collective."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._storages = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor):
                storage = (leaf._local_tensor if isinstance(leaf, DTensor) else leaf).untyped_storage()
                self._storages.setdefault(storage._cdata, StorageWeakRef(storage))
        live = {key: torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for key, ref in self._storages.items()}
        for key in [key for key, storage in live.items() if storage is None]:
            del self._storages[key]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in live.values() if storage is not None))
        return out


def peak_bytes(step: Callable[[], None], warmup: int = 2) -> int:
    """Bytes of tensors that are live at most during a step, those from before included."""
    for _ in range(warmup):
        step()
    with LiveBytes() as counter:
        step()
    return counter.peak
