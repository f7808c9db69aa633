"""Updates of a pipeline: each rank has some stages, and replicas of the pipeline reduce stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from course_lib import tensor
from course_lib.job.mesh import Mesh
from course_lib.job.model import autocast, loss_of_scores, make_optimizer, terms
from course_lib.job.options import Options
from course_lib.job.stages import cut
from course_lib.job.trainee import Made, Trainee, norm_of
from course_lib.schedule import Schedule, add_reductions, gpipe, interleaved, one_f_one_b, zb_v, zero_bubble
from course_lib.schedule.execute import Pipeline
from course_lib.train.data import Batch
from course_lib.train.gpt import GPT
from course_lib.train.loss import global_tokens

MAKERS = {"1f1b": one_f_one_b, "gpipe": gpipe, "interleaved": lambda p, m: interleaved(p, m, 2),
          "zero-bubble": zero_bubble, "zb-v": zb_v}
MB = 2**20


class Piped(Trainee):
    """The stages of `model` that the schedule puts on this rank."""

    def __init__(self, options: Options, mesh: Mesh, model: GPT) -> None:
        super().__init__(options, mesh)
        device = next(model.parameters()).device
        modules = cut(model, options.stages, partial(autocast, options, device))
        schedule = MAKERS[options.pipeline](options.pp, options.micro_steps)
        if options.dp > 1:
            schedule = add_reductions(schedule, [_buckets(module, options.bucket_mb) for module in modules])
        stages = {stage: modules[stage] for stage in schedule.stages_of(mesh.stage)}
        self._all = nn.ModuleList(stages.values())
        tied = schedule.stages > 1 and options.config.tied
        self._pipeline = Pipeline(schedule, stages, partial(loss_of_scores, options, mesh), group=mesh.pipeline,
                                  replicas=mesh.replicas if options.dp > 1 else None,
                                  ties=[[(0, "embed.weight"), (schedule.stages - 1, "head.weight")]] if tied else [])
        self.params = {}
        for module in self._all:
            self.params |= {n: p for n, p in module.named_parameters() if id(p) not in map(id, self.params.values())}
        # the copy of a tied weight counts once in the norm of the whole model
        self._copies = [p for n, p in self.params.items() if tied and n == "head.weight" and not _first(schedule, mesh)]
        self.knows_compute = mesh.shards is None
        self.optimizer = make_optimizer(options, self.params.values())

    def update(self, window: Sequence[Batch]) -> Made:
        tokens = global_tokens([terms(batch) for batch in window], self.mesh.replicas)
        share = self._pipeline.run(window, max(1, tokens))
        if self.options.sequence_parallel:
            tensor.finish_replicated_gradients(self._all)
        norm = norm_of(self._all, self._copies, self.mesh.pipeline)
        self.clip(norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Made(float(share), float(norm))

    def weights(self) -> dict[str, torch.Tensor]:
        mine = {}
        for module in self._all:
            mine |= tensor.full_state(module)
        parts = [None] * self.options.pp
        dist.all_gather_object(parts, {name: value.cpu() for name, value in mine.items()}, group=self.mesh.pipeline)
        return {name: value for part in parts for name, value in part.items()}


def _first(schedule: Schedule, mesh: Mesh) -> bool:
    return schedule.rank_of[0] == mesh.stage


def _buckets(module: nn.Module, bucket_mb: float) -> int:
    """Parts of a stage of at most about the asked size, of a parameter or more. Every rank comes to the same number for
    every stage."""
    params = list(module.parameters())
    return max(1, round(min(len(params), sum(p.numel() * p.element_size() for p in params) / (bucket_mb * MB))))
