"""One weight in stages on different ranks, as the embedding of a GPT that is its output matrix too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from course_lib.schedule.action import Schedule, ScheduleError
from course_lib.tensor.collective import in_memory

Ties = Sequence[Sequence[tuple[int, str]]]


class Tied:
    """Keeps the copies of a weight equal: the first holder's value at the start, the sum of all gradients after
    each window. Sums commute, so that it does not matter that replicas are summed first.

    Each entry of `ties` lists the (stage, parameter name) that are one weight. Copies on one rank must be one
    parameter. Raises `ScheduleError` otherwise, or for a name that is not there.
    """

    def __init__(self, ties: Ties, schedule: Schedule, stages: Mapping[int, nn.Module], rank: int,
                 ranks: Sequence[int]) -> None:
        self._shared: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        for uses in ties:
            holders = sorted({schedule.rank_of[stage] for stage, _ in uses})
            # torch names a group by how many its ranks have, so the others make one too, each for itself.
            among = [ranks[h] for h in holders] if rank in holders else [ranks[rank]]
            group = dist.new_group(among, use_local_synchronization=True) if len(holders) > 1 else None
            if rank not in holders:
                continue
            mine = [_parameter(stages[stage], stage, name) for stage, name in uses if stage in stages]
            if any(p is not mine[0] for p in mine):
                raise ScheduleError(f"{list(uses)} are tied, but different parameters on one rank; assign one to the "
                                    "other")
            if group is not None:
                with torch.no_grad():
                    value = in_memory(mine[0].detach())
                    dist.broadcast(value, ranks[holders[0]], group=group)
                    mine[0].copy_(value)
                self._shared.append((mine[0], group))

    def sum(self) -> None:
        """Add up the gradients of all copies. Every rank that holds one calls it."""
        for param, group in self._shared:
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            total = in_memory(grad)
            dist.all_reduce(total, group=group)
            param.grad = total if total is grad else torch.empty_like(param).copy_(total)


def _parameter(module: nn.Module, stage: int, name: str) -> nn.Parameter:
    found = dict(module.named_parameters(remove_duplicate=False))
    if name not in found:
        raise ScheduleError(f"stage {stage} has no parameter {name!r} to tie; it has {', '.join(found) or 'none'}")
    return found[name]
