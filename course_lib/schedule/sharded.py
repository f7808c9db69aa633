"""Stages whose parameters and gradients are spread over the replicas (ZeRO-3): whole only while they are gathered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from course_lib import record
from course_lib.launch.renamed import all_gather_single, reduce_scatter_single
from course_lib.schedule.action import WHOLE, ScheduleError
from course_lib.schedule.replicas import one_dtype, parts_of


class _Part:
    """One bucket of a stage. `shard` is this rank's 1/n of its elements, padded to equal length."""

    def __init__(self, params: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.params, self._group, ranks = params, group, dist.get_world_size(group)
        self._sizes = [p.numel() for p in params]
        each = -(-sum(self._sizes) // ranks)
        self._shapes = [p.shape for p in params]
        self._full = params[0].new_zeros(each * ranks)
        self._padding = each * ranks - sum(self._sizes)
        self._full[:sum(self._sizes)] = torch.cat([p.detach().flatten() for p in params])
        self.shard = nn.Parameter(self._full[each * dist.get_rank(group):][:each].clone())
        self.free()

    def gather(self) -> dist.Work:
        """The same storage each time: what autograd saved as a view of a parameter finds its values again."""
        storage = self._full.untyped_storage()
        storage.resize_(self._full.numel() * self._full.element_size())
        self.whole = True
        for p, view, shape in zip(self.params, self._full.split([*self._sizes, self._padding]), self._shapes):
            p.data = view.view(shape)
        return all_gather_single(self._full, self.shard.detach(), group=self._group, async_op=True)

    def free(self) -> None:
        self.whole = False
        for p in self.params:
            p.data = p.data.new_empty(0)
        self._full.untyped_storage().resize_(0)

    def reduce(self) -> tuple[torch.Tensor, dist.Work]:
        """This rank's part of the sum of gradients, on its way. The whole gradient is given up."""
        pieces = [torch.zeros(n, dtype=self.shard.dtype, device=self.shard.device) if p.grad is None
                  else p.grad.flatten() for p, n in zip(self.params, self._sizes)]
        whole = torch.cat([*pieces, self.shard.new_zeros(self._padding)])
        for p in self.params:
            p.grad = None
        mine = torch.empty_like(self.shard)
        return mine, reduce_scatter_single(mine, whole, group=self._group, async_op=True)


class Sharded:
    """Gathers parameters and reduce-scatters gradients as the schedule says. Arguments as for `Replicas`; the
    optimizer holds `parameters(stage)`. A frozen parameter stays whole. Raises `ScheduleError` where two stages of
    the rank share a parameter, which cannot be gathered for one of them alone."""

    def __init__(self, stages: Mapping[int, nn.Module], buckets: Mapping[int, int], group: dist.ProcessGroup) -> None:
        owner: dict[int, int] = {}
        for stage in sorted(stages):
            for p in stages[stage].parameters():
                if owner.setdefault(id(p), stage) != stage and p.requires_grad:
                    raise ScheduleError(f"stages {owner[id(p)]} and {stage} share a parameter; leave their rank "
                                        "unsharded or give each its own")
        self._parts = {key: _Part(one_dtype(key, params), group)
                       for key, params in parts_of(stages, buckets).items() if params}
        self._coming: dict[int, list[dist.Work]] = {}
        self._travelling: list[tuple[tuple[int, int], torch.Tensor, dist.Work]] = []

    def parameters(self, stage: int, bucket: int = WHOLE) -> list[nn.Parameter]:
        """What an optimizer of the stage holds, one flat shard a bucket, or that of one bucket."""
        return [part.shard for (s, b), part in self._parts.items() if s == stage and bucket in (WHOLE, b)]

    def gather(self, keys: Iterable[tuple[int, int]]) -> None:
        """Begin to gather each (stage, bucket) that is not whole."""
        for key in keys:
            if (part := self._parts.get(key)) is not None and not part.whole:
                self._coming.setdefault(key[0], []).append(part.gather())

    def missing(self, keys: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Which of them are not whole."""
        return [key for key in keys if key in self._parts and not self._parts[key].whole]

    def coming(self, stage: int) -> list[dist.Work]:
        """What to wait for before the stage computes."""
        return self._coming.pop(stage, [])

    def free(self, stage: int) -> None:
        for work in self.coming(stage):
            work.wait()
        for (s, _), part in self._parts.items():
            if s == stage:
                part.free()

    def start(self, stage: int, bucket: int) -> None:
        """Send the gradient of a bucket on its way."""
        if (part := self._parts.get((stage, bucket))) is not None:
            with record.tag(bucket):
                self._travelling.append(((stage, bucket), *part.reduce()))

    def finish(self, wanted: Iterable[tuple[int, int]]) -> None:
        """Wait for the gradients of these (stage, bucket); each shard's `.grad` is then its part of the sum."""
        rest, wanted = [], set(wanted)
        for key, mine, work in self._travelling:
            if key not in wanted:
                rest.append((key, mine, work))
                continue
            work.wait()
            shard = self._parts[key].shard
            shard.grad = mine if shard.grad is None else shard.grad + mine
        self._travelling = rest
