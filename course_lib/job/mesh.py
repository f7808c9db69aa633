"""The groups of a run's `Grid` as the training command names them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from course_lib.job.options import Options
from course_lib.schedule.degrees import Degrees
from course_lib.schedule.grid import grid


@dataclass(frozen=True)
class Mesh:
    """Rank = (replica · pp + stage) · tp + shard: the ranks that share a layer are neighbours, on one node where tp
    divides its ranks. A group is None where this rank would be alone in it, but for `replicas`."""

    replica: int
    stage: int
    shard: int
    replicas: dist.ProcessGroup
    """The ranks that hold the same parameters."""
    pipeline: dist.ProcessGroup | None
    shards: dist.ProcessGroup | None

    @property
    def cell(self) -> str:
        """What the parameters of this rank are called in a checkpoint."""
        return f"stage-{self.stage}-shard-{self.shard}"

    @property
    def speaks(self) -> bool:
        """One rank of each cell writes what all of its replicas hold."""
        return self.replica == 0


def mesh(options: Options) -> Mesh:
    """Make the groups; collective call. `options` are laid out."""
    if options.pp == options.tp == 1:
        return Mesh(dist.get_rank(), 0, 0, dist.group.WORLD, None, None)
    found = grid(Degrees(pipeline=options.pp, tensor=options.tp, data=options.dp))
    return Mesh(found.replica, found.stage, found.shard, found.data, found.pipeline if options.pp > 1 else None,
                found.tensor if options.tp > 1 else None)
