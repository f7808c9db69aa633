"""Who works with whom in a joint run: ranks in a block of replicas × pipeline × tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from course_lib.launch.wire import Wire
from course_lib.schedule.degrees import Degrees


@dataclass(frozen=True)
class Grid:
    """This rank's place and its groups. `data` are the ranks that hold the same part of the same stages."""

    replica: int
    stage: int
    shard: int
    pipeline: dist.ProcessGroup
    tensor: dist.ProcessGroup
    data: dist.ProcessGroup


def grid(degrees: Degrees) -> Grid:
    """Make the groups; every rank calls it at the same point. Raises `ValueError` where the ranks do not fill them."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if ranks != degrees.ranks:
        raise ValueError(f"{' × '.join(map(str, degrees))} takes {degrees.ranks} ranks, and this run has {ranks}; "
                         "start that many")
    p, t, d = degrees.pipeline, degrees.tensor, degrees.data
    at = {(r, s, h): (r * p + s) * t + h for r in range(d) for s in range(p) for h in range(t)}
    replica, stage, shard = next(place for place, number in at.items() if number == rank)

    def mine(groups: list[list[int]]) -> dist.ProcessGroup:
        made = [dist.new_group(members) for members in groups]
        return next(group for group, members in zip(made, groups) if rank in members)

    pipeline = mine([[at[r, s, h] for s in range(p)] for r in range(d) for h in range(t)])
    tensor = mine([[at[r, s, h] for h in range(t)] for r in range(d) for s in range(p)])
    data = mine([[at[r, s, h] for r in range(d)] for s in range(p) for h in range(t)])
    if isinstance(data, Wire):
        data.queue = "replicas"  # its collectives fall between those of the layers
    return Grid(replica, stage, shard, pipeline, tensor, data)
