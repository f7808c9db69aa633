"""Random numbers: the same where activations are replicated, different where they are shards.

Seed the ranks of a tensor-parallel group alike, and every dropout on replicated activations draws the same mask on
all of them. Inside `sharded_random` each rank draws its own. The seed of such a block is itself drawn from the common
generator: all ranks move on alike, and a recomputation, which restores that generator, finds the same masks again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.tensor.shard import place


@contextmanager
def sharded_random(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Random numbers of this rank's own inside the block; afterwards the common stream goes on, on every rank alike.

    Every rank of the group enters it at the same point of its stream: all seeded alike, and none draws more outside.
    """
    rank, ranks = place(group)
    seed = int(torch.randint(2**62 // ranks, ())) * ranks + rank
    here = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(here):
        torch.default_generator.manual_seed(seed)
        if here:
            torch.cuda.manual_seed(seed)
        yield


class ShardedDropout(nn.Module):
    """Dropout for activations of which each rank holds a different part. On replicated ones use `nn.Dropout`."""

    def __init__(self, p: float, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"p={p}: give a probability from 0 to 1")
        self.p, self.group = p, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        with sharded_random(self.group):
            return F.dropout(x, self.p)


def refuse_different_random(group: dist.ProcessGroup | None) -> None:
    """Raises `RuntimeError` on every rank where the generators of the group's ranks are not in the same state: they
    were seeded differently, or one has drawn more. Collective call."""
    state = torch.get_rng_state()
    states = [torch.empty_like(state) for _ in range(place(group)[1])]
    dist.all_gather(states, state, group=group)
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    if apart := [rank for rank, other in zip(ranks, states, strict=True) if not torch.equal(other, states[0])]:
        raise RuntimeError(f"the random state of rank {', '.join(map(str, apart))} is not that of rank {ranks[0]}, so "
                           "replicated dropout would differ; call torch.manual_seed with one seed on all of them")
