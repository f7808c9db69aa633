"""Recursive doubling: after step k every rank has the sum of a group of 2^(k+1), and there are few steps.

⌈log₂ n⌉ hops instead of a ring's 2(n−1), but the whole tensor at each: for messages so small that latency is all
they cost. (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.)
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_lib.collectives.issue import checked, issue


def all_reduce_doubling(tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, op: str = "sum",
                        async_op: bool = False) -> dist.Work | None:
    """Sum or mean over ranks, in place, in log₂ n exchanges of the whole tensor; where n is no power of two, in two
    hops more, because the ranks beyond the largest power hand their tensor to a partner and get the result from it.

    Partners add the same two numbers, and a + b is b + a to the bit: the result is the same on all ranks. Returns
    and raises as `all_reduce_ring`.
    """
    flat, group = checked(tensor, op, group)
    return issue("all_reduce_doubling", tensor, group, lambda: _double(flat, group, op), async_op)


def _double(flat: torch.Tensor, group: dist.ProcessGroup, op: str) -> None:
    n, r = group.size(), group.rank()
    power = 1 << (n.bit_length() - 1)
    if not flat.numel():
        return
    if r >= power:
        dist.isend(flat, group=group, group_dst=r - power).wait()
        dist.irecv(flat, group=group, group_src=r - power).wait()
        return
    other = torch.empty_like(flat)
    if r + power < n:
        dist.irecv(other, group=group, group_src=r + power).wait()
        flat.add_(other)
    distance = 1
    while distance < power:
        coming = dist.irecv(other, group=group, group_src=r ^ distance)
        dist.isend(flat, group=group, group_dst=r ^ distance).wait()
        coming.wait()
        flat.add_(other)
        distance *= 2
    if op == "mean":
        flat.div_(n)
    if r + power < n:
        dist.isend(flat, group=group, group_dst=r + power).wait()
