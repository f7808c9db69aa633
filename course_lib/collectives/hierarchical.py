"""Hierarchical all-reduce: reduce-scatter inside each node, all-reduce between nodes, all-gather inside.

The slow wire between nodes carries 2(m−1)/m·S of a node's traffic instead of the 2(n−1)/n·S of a flat ring over
m nodes with n ranks, and it is crossed in 2(m−1) hops instead of 2(n−1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from course_lib import launch
from course_lib.collectives.issue import checked, issue
from course_lib.collectives.ring import CHUNKS, ring_all_gather, ring_all_reduce, ring_reduce_scatter, segments


def node_groups(node_of: Sequence[int] | None = None) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """(inner, inter): this rank's group inside its node, and the group of the ranks that have its place in every
    node. `node_of[r]` is the node of rank r (default: where the fabric put it). Collective call; keep the groups.

    Raises `ValueError` where the nodes do not have equally many ranks.
    """
    node_of = launch.context().spec.node_of if node_of is None else node_of
    nodes = [[r for r, node in enumerate(node_of) if node == one] for one in sorted(set(node_of))]
    if len({len(ranks) for ranks in nodes}) > 1 or len(node_of) != dist.get_world_size():
        raise ValueError(f"nodes of {', '.join(str(len(ranks)) for ranks in nodes)} ranks for "
                         f"{dist.get_world_size()} ranks: a hierarchical collective needs every rank on a node, and as "
                         "many ranks on each")
    inner, _ = dist.new_subgroups_by_enumeration(nodes)
    inter, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in zip(*nodes)])
    return inner, inter


def all_reduce_hierarchical(tensor: torch.Tensor, inner: dist.ProcessGroup, inter: dist.ProcessGroup, *,
                            op: str = "sum", chunks: int = CHUNKS, async_op: bool = False) -> dist.Work | None:
    """Sum or mean over all ranks of all nodes, in place. The groups are those of `node_groups()`.

    A rank sends 2(g−1)/g·S bytes inside its node of g ranks and 2(m−1)/m·S/g between the m nodes. The result is
    the same to the bit on all ranks. Returns and raises as `all_reduce_ring`.
    """
    flat, inner = checked(tensor, op, inner)
    _, inter = checked(tensor, op, inter)

    def body() -> None:
        mine = segments(flat, inner.size())[inner.rank()]
        ring_reduce_scatter(flat, inner, chunks, "sum")
        ring_all_reduce(mine, inter, chunks, op, divisor=inner.size() * inter.size())
        ring_all_gather(flat, inner, chunks)

    return issue("all_reduce_hierarchical", tensor, inter, body, async_op)
