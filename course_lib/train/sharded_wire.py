"""How the flat tensor of a unit travels: over our rings, or, on a GPU, by NCCL's own, which are rings as well."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_lib.collectives import all_gather_ring, reduce_scatter_ring, segments


def all_gather(flat: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
    """Every rank's segment of `flat` to all, in place."""
    if not _by_the_group(flat):
        return all_gather_ring(flat, group, async_op=async_op)
    parts = segments(flat, group.size())
    return dist.all_gather(parts, parts[group.rank()].clone(), group=group, async_op=async_op)


def reduce_scatter(flat: torch.Tensor, group: dist.ProcessGroup, op: str) -> dist.Work:
    """Sum or mean over ranks of this rank's segment of `flat`, in place; the other segments are lost."""
    if not _by_the_group(flat):
        return reduce_scatter_ring(flat, group, op=op, async_op=True)
    parts = segments(flat, group.size())
    how = dist.ReduceOp.AVG if op == "mean" else dist.ReduceOp.SUM
    return dist.reduce_scatter(parts[group.rank()], [part.clone() for part in parts], how, group, async_op=True)


def _by_the_group(flat: torch.Tensor) -> bool:
    return flat.is_cuda
