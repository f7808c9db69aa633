"""Who works with whom: ranks in a block of replicas × stages × shards."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from course_lib.launch.wire import Wire
from course_lib.train.job.options import Options


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
    rank, ranks = dist.get_rank(), dist.get_world_size()
    each = options.pp * options.tp
    replica, (stage, shard) = rank // each, divmod(rank % each, options.tp)
    if each == 1:
        return Mesh(replica, 0, 0, dist.group.WORLD, None, None)
    across = _groups([list(range(start, ranks, each)) for start in range(each)])
    if isinstance(across, Wire):  # buckets leave when they are full, between the collectives of the layers
        across.queue = "replicas"
    pipelines = _groups([list(range(r * each + t, (r + 1) * each, options.tp))
                         for r in range(options.dp) for t in range(options.tp)]) if options.pp > 1 else None
    shards = _groups([list(range(start, start + options.tp)) for start in range(0, ranks, options.tp)]
                     ) if options.tp > 1 else None
    return Mesh(replica, stage, shard, across, pipelines, shards)


def _groups(members: list[list[int]]) -> dist.ProcessGroup:
    """Every rank takes part in making every group, as torch asks for; the one with this rank."""
    made = [dist.new_group(ranks) for ranks in members]
    return next(group for group, ranks in zip(made, members) if dist.get_rank() in ranks)
