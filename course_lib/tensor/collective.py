"""All-gather and reduce-scatter of one tensor, started at once and waited for by the caller."""

from __future__ import annotations

import json
import weakref

import torch
import torch.distributed as dist

from course_lib.launch.renamed import all_gather_single, reduce_scatter_single
from course_lib.tensor.shard import place
from course_lib.train.control import Control

InFlight = tuple[torch.Tensor, torch.Tensor, dist.Work]
"""The result, what is sent (which must stay referenced and untouched until it has arrived), and the work."""

_compared: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[Control, set]] = weakref.WeakKeyDictionary()


def in_memory(x: torch.Tensor) -> torch.Tensor:
    """The values as they lie in memory, one after the other: what lies there is sent, and a conjugation or a sign that
    torch has put off would be lost. `x` itself where it is so already."""
    return x.resolve_conj().resolve_neg().contiguous()


def same_everywhere(x: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Compare shape and dtype over the ranks, off the wire, once for each that this rank meets: gloo ends the process
    where lengths differ. Collective call. Raises `ValueError` on every rank where they are not the same."""
    group = dist.group.WORLD if group is None else group
    if group not in _compared:
        _compared[group] = Control(group), set()
    control, known = _compared[group]
    mine = tuple(x.shape), str(x.dtype).removeprefix("torch.")
    if mine in known:
        return
    notes = control.exchange(json.dumps(mine).encode(), "the first activations of a shape")
    if len(set(notes)) > 1:
        shapes = ", ".join(f"{tuple(shape)} {dtype} on rank {rank}"
                           for rank, (shape, dtype) in zip(control.ranks, map(json.loads, notes)))
        raise ValueError(f"the ranks' activations differ ({shapes}) and cannot be exchanged; cut the sequence into "
                         "equal parts, padded where the ranks do not divide it, and give every rank the same batch")
    known.add(mine)


def start_gather(x: torch.Tensor, group: dist.ProcessGroup | None) -> InFlight:
    """The tensors (…) of all ranks as one of (ranks, …)."""
    x = in_memory(x)
    whole = x.new_empty(place(group)[1], *x.shape)
    return whole, x, all_gather_single(whole.view(-1), x.view(-1), group=group, async_op=True)


def start_scatter(parts: torch.Tensor, group: dist.ProcessGroup | None) -> InFlight:
    """Of (ranks, …), this rank's (…) summed over the ranks. The inputs are sent flat: gloo wants that."""
    parts = in_memory(parts)
    mine = torch.empty_like(parts[0])
    return mine, parts, reduce_scatter_single(mine.view(-1), parts.view(-1), group=group, async_op=True)


def arrived(flight: InFlight) -> torch.Tensor:
    """Wait for the result."""
    flight[2].wait()
    return flight[0]
