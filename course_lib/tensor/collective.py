"""All-gather and reduce-scatter of one tensor, started at once and waited for by the caller."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_lib.launch.renamed import all_gather_single, reduce_scatter_single
from course_lib.tensor.shard import place

InFlight = tuple[torch.Tensor, torch.Tensor, dist.Work]
"""The result, what is sent (which must stay referenced and untouched until it has arrived), and the work."""


def start_gather(x: torch.Tensor, group: dist.ProcessGroup | None) -> InFlight:
    """The tensors (…) of all ranks as one of (ranks, …)."""
    x = x.contiguous()
    whole = x.new_empty(place(group)[1], *x.shape)
    return whole, x, all_gather_single(whole.view(-1), x.view(-1), group=group, async_op=True)


def start_scatter(parts: torch.Tensor, group: dist.ProcessGroup | None) -> InFlight:
    """Of (ranks, …), this rank's (…) summed over the ranks. The inputs are sent flat: gloo wants that."""
    parts = parts.contiguous()
    mine = torch.empty_like(parts[0])
    return mine, parts, reduce_scatter_single(mine.view(-1), parts.view(-1), group=group, async_op=True)


def arrived(flight: InFlight) -> torch.Tensor:
    """Wait for the result."""
    flight[2].wait()
    return flight[0]
