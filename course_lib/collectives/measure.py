"""What a message costs on each kind of wire, fitted from rings that are sent over it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from course_lib.collectives.ring import all_reduce_ring
from course_lib.launch.measure import fit, train_time_s
from course_lib.link_cost import LinkCost
from course_lib.simulate.collectives import Nodes, ring

SIZES = (2**10, 2**20)
"""Bytes of a ring whose time is all α, and of one whose time is nearly all β. Large ones alone would not tell α: what a
shaped wire may not send while a message waits out its latency, it sends at once afterwards."""


def measure_message(group: dist.ProcessGroup | None = None, sizes: Sequence[int] = SIZES,
                    repeats: int = 5) -> LinkCost:
    """α in seconds and β in seconds per byte of one message, from the fastest of `repeats` rings of each size (bytes)
    over the group. Every rank of the group calls it and gets the fit of its first rank. Raises `ValueError` for a
    group of one rank, which sends no message."""
    group = dist.group.WORLD if group is None else group
    n = dist.get_world_size(group)
    if n < 2:
        raise ValueError("a group of one rank sends no message; measure on a group of two ranks or more")
    ways = {size: partial(all_reduce_ring, torch.zeros(size // 4), group, chunks=1, async_op=True) for size in sizes}
    times = {size: [] for size in sizes}
    for _ in range(repeats + 1):  # in alternation, so that a busy moment does not fall on one size alone
        for size, way in ways.items():
            times[size].append(train_time_s(way, 2, group))
    one = ring(n, LinkCost(1.0, 1.0))
    a, beta = fit(sizes, [min(times[size][1:]) for size in sizes])
    fitted = torch.tensor([a / one.a_s, beta / one.beta_s_per_byte], dtype=torch.float64)
    dist.broadcast(fitted, dist.get_global_rank(group, 0), group=group)
    return LinkCost(*fitted.tolist())


def measure_nodes(inner: dist.ProcessGroup, inter: dist.ProcessGroup, shared: bool = True,
                  sizes: Sequence[int] = SIZES, repeats: int = 5) -> Nodes:
    """The wires inside and between nodes, with the groups of `node_groups()`; every rank calls it. Between nodes the
    first ranks alone send, so that what is found is the rate of a whole uplink. Raises `ValueError` for one node, or
    one rank a node."""
    inside = measure_message(inner, sizes, 8 * repeats)  # fast, so cheap to repeat, and a busy moment weighs more
    dist.barrier()
    found = [measure_message(inter, sizes, repeats) if inner.rank() == 0 else None]
    dist.barrier()
    dist.broadcast_object_list(found, dist.get_global_rank(inner, 0), group=inner)
    return Nodes(inter.size(), inner.size(), inside, found[0], shared)
