"""Run a schedule on ranks: each does its own list, in order, on stages that are ordinary modules.

    pipeline = Pipeline(one_f_one_b(4, 8), {rank: stage}, loss_of)
    pipeline.run(window, denominator=tokens_of_the_whole_window)
    optimizer.step()

Sends go on at once and receives are posted where the schedule says, so that messages travel under compute.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from course_lib.schedule.action import (
    BACKWARD,
    COMPUTE,
    LAST_USE,
    RECEIVES,
    SENDS,
    Action,
    Op,
    Schedule,
    ScheduleError,
)
from course_lib.schedule.check import check
from course_lib.schedule.clock import Clock
from course_lib.schedule.mail import Mail, Shapes, describe
from course_lib.schedule.messages import with_messages
from course_lib.schedule.replicas import Replicas
from course_lib.schedule.sharded import Sharded
from course_lib.schedule.split import backward_input
from course_lib.schedule.tied import Tied, Ties
from course_lib.train.base import Strategy
from course_lib.train.broadcast import broadcast_module
from course_lib.train.control import Control, ranks_text

LossOf = Callable[[torch.Tensor, Any], torch.Tensor]


class Pipeline:
    """The part of one rank in a pipeline.

    `stages` maps the numbers of this rank's stages to modules; each takes one tensor and gives one tensor. The first
    stage takes `batch[0]` of a micro-batch; `loss_of(output, batch)` turns what the last stage puts out into the
    *summed* loss of the micro-batch. `group` holds the ranks of this pipeline in order (default: all ranks),
    `replicas` the ranks that hold the same stages in other pipelines: they start from the parameters of the first of
    them, and the schedule must reduce (`add_reductions`). Where it gathers parameters too (`add_gathers`), they are
    sharded over the replicas (ZeRO-3). `step(stage)` is called for a `step` action; an optimizer holds
    `parameters(stage)`. `ties` lists weights that stages on different ranks share, each as the (stage, name) of its
    uses: their gradients are summed at the end of a window.

    Every rank of the pipeline makes one at the same point. The schedule is checked, and messages are added where it
    has none, before anything runs. Raises `ScheduleError` for a schedule that cannot run or stages that do not fit.
    """

    def __init__(self, schedule: Schedule, stages: Mapping[int, nn.Module], loss_of: LossOf, *,
                 group: dist.ProcessGroup | None = None, replicas: dist.ProcessGroup | None = None,
                 step: Callable[[int], None] | None = None, ties: Ties = ()) -> None:
        group = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(group)
        schedule = with_messages(schedule)
        check(schedule)
        self.schedule, self.stages, self.loss_of, self._step = schedule, dict(stages), loss_of, step
        self._refuse(group, replicas, ties)
        name = self._agree(group)
        if replicas is not None:
            self._agree(replicas)
        self._actions = schedule.ranks[self.rank]
        self._splits = {a.stage for a in self._actions if a.op is Op.I}
        self._params = {s: list(module.parameters()) for s, module in stages.items()}
        limit_s = getattr(getattr(group, "spec", None), "timeout_s", 300.0)
        self._device = next((p.device for params in self._params.values() for p in params), torch.device("cpu"))
        self._shapes = Shapes(f"course_lib/schedule/{name}", limit_s)
        self._mail = Mail(schedule, self.rank, group, self._device, self._shapes)
        self._clock = Clock(self._device)
        self._under_way = False
        self._tied = Tied(ties, schedule, self.stages, self.rank, dist.get_process_group_ranks(group))
        self._over = None if replicas is None or dist.get_world_size(replicas) == 1 else self._spread(replicas)

    def parameters(self, stage: int) -> list[nn.Parameter]:
        """What an optimizer of the stage holds: its parameters, or where they are sharded this rank's shards."""
        return [p for p in self._params[stage] if p.requires_grad] if self._over is None \
            else self._over.parameters(stage)

    def _spread(self, replicas: dist.ProcessGroup) -> Replicas | Sharded:
        for module in self.stages.values():
            broadcast_module(module, replicas)
        last = {a.stage: k for k, a in enumerate(self._actions) if a.op in LAST_USE}
        stages = {stage: self.stages[stage] for stage in sorted(last, key=last.__getitem__)}
        kind = Sharded if any(a.op is Op.GATHER for a in self._actions) else Replicas
        return kind(stages, dict(enumerate(self.schedule.buckets)), replicas)

    def _refuse(self, group: dist.ProcessGroup, replicas: dist.ProcessGroup | None, ties: Ties) -> None:
        if dist.get_world_size(group) != len(self.schedule.ranks):
            raise ScheduleError(f"the schedule is for {len(self.schedule.ranks)} ranks, the group has "
                                f"{dist.get_world_size(group)}; give the group of one pipeline")
        if sorted(self.stages) != list(self.schedule.stages_of(self.rank)):
            raise ScheduleError(f"rank {self.rank} was given stages {sorted(self.stages)}, but the schedule puts "
                                f"{list(self.schedule.stages_of(self.rank))} there")
        for stage, module in self.stages.items():
            if isinstance(module, DistributedDataParallel | FSDPModule | Strategy):
                raise ScheduleError(f"stage {stage} is wrapped in {type(module).__name__}, which would reduce in every "
                                    "micro-batch; give the bare module, replicas=… and a schedule with add_reductions")
        spread = replicas is not None and dist.get_world_size(replicas) > 1
        if spread and not self.schedule.buckets:
            raise ScheduleError(f"there are {dist.get_world_size(replicas)} replicas, but the schedule never reduces, "
                                "so they would drift apart; pass it through add_reductions")
        ops = {a.op for a in self.schedule.ranks[self.rank]}
        if Op.GATHER in ops and not spread:
            raise ScheduleError("the schedule gathers parameters, but without replicas they are whole; leave "
                                "add_gathers out, or give replicas=…")
        if ties and ops & {Op.GATHER, Op.STEP}:
            raise ScheduleError("tied weights are summed when the schedule has run and whole; leave add_gathers and "
                                "add_steps out, and step after run()")
        if Op.STEP in ops and self._step is None:
            raise ScheduleError("the schedule has step actions; give step=…, what to call for each stage")

    def _agree(self, group: dist.ProcessGroup) -> str:
        """Ranks with different schedules would wait for each other for ever. Returns a name that all have in common."""
        control = Control(group)
        digest = hashlib.sha256(self.schedule.text().encode()).digest()
        theirs = control.exchange(digest + os.urandom(8), "the start of a pipeline")
        if other := [r for r, note in zip(control.ranks, theirs) if note[:-8] != theirs[0][:-8]]:
            raise ScheduleError(f"{ranks_text(other)} made another schedule than rank {control.ranks[0]}; make the "
                                "same on every rank")
        return theirs[0][-8:].hex()

    def run(self, window: Sequence[Any], denominator: float, last: bool = True) -> float:
        """One pass of the schedule over its micro-batches; gradients are added to `.grad`.

        `denominator` is what the summed losses are divided by: the terms (tokens, samples) of the *whole* window, over
        all passes of this update and all replicas. Where an update takes several passes, all but the last have
        `last=False` and leave reductions and steps out. Only the ranks of the first and the last stage look into
        the micro-batches. Returns this rank's share of the loss. Raises `ScheduleError` for another number of
        micro-batches than the schedule's, and naming stage, rank and shapes for a stage that fails.
        """
        if len(window) != self.schedule.micro_batches:
            raise ScheduleError(f"{len(window)} micro-batches, but the schedule takes {self.schedule.micro_batches}; "
                                "generate one for this number")
        if not denominator > 0:
            raise ValueError(f"denominator={denominator}: give the number of terms of the whole window, above 0")
        if self._under_way:
            raise RuntimeError("an earlier pass failed half-way, so that its messages may still be under way; start "
                               "the ranks again")
        self._under_way = True
        one = _Pass(self, window, denominator)
        self._clock.begin()
        for action in self._actions:
            if last or action.op not in (Op.REDUCE, Op.STEP):
                with self._clock.action(action, self.schedule.name(action)):
                    one.do(action)
        if self._over is not None:
            self._over.finish()
        if last:
            self._tied.sum()
        self._mail.finish()
        self._clock.end()
        self._under_way = False
        return float(sum(one.losses))


class _Pass:
    """What lives during one pass: inputs, outputs, and gradients on their way."""

    def __init__(self, pipeline: Pipeline, window: Sequence[Any], denominator: float) -> None:
        self.pipeline, self.window, self.denominator = pipeline, window, denominator
        self.graphs: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.halves: dict[tuple[int, int], Any] = {}
        self.out: dict[Action, torch.Tensor] = {}  # what a neighbour will take, by its receive
        self.losses: list[torch.Tensor] = []

    def do(self, action: Action) -> None:
        pipeline, stage, i = self.pipeline, action.stage, action.index
        over = pipeline._over
        if action.op in COMPUTE and isinstance(over, Sharded):
            for work in over.coming(stage):
                pipeline._clock.wait(work)
        if action.op is Op.F:
            self._forward(stage, i)
        elif action.op in BACKWARD:
            self._backward(action)
        elif action.op is Op.W:
            self.halves.pop((stage, i)).run()
        elif action.op in SENDS:
            pipeline._mail.send(action, self.out.pop(action.partner()))
        elif action.op in RECEIVES:
            pipeline._mail.post(action)
        elif action.op is Op.STEP:
            if over is not None:
                over.finish(stage)
                pipeline._clock.mark()
            pipeline._step(stage)
        elif action.op is Op.GATHER:
            over.gather(stage)
        elif action.op is Op.FREE:
            over.free(stage)
        elif over is not None:
            over.start(stage, i)

    def _take(self, receive: Action) -> torch.Tensor:
        """What a neighbouring stage gave, from this rank or another."""
        if receive in self.out:
            return self.out.pop(receive)
        buffer, work = self.pipeline._mail.take(receive)
        self.pipeline._clock.wait(work)
        return buffer.to(self.pipeline._device)

    def _forward(self, stage: int, i: int) -> None:
        pipeline = self.pipeline
        x = self.window[i][0] if stage == 0 else self._take(Action(Op.RECV_F, stage, i))
        if x.is_floating_point() and (stage > 0 or stage in pipeline._splits):
            x = x.detach().requires_grad_()
        output = self._through(stage, i, x)
        if stage + 1 < pipeline.schedule.stages:
            pipeline._shapes.tell(stage, i, output)
            self.out[Action(Op.RECV_F, stage + 1, i)] = output.detach()
        else:
            output = pipeline.loss_of(output, self.window[i]) / self.denominator
            self.losses.append(output.detach())
        self.graphs[stage, i] = x, output

    def _through(self, stage: int, i: int, x: torch.Tensor) -> torch.Tensor:
        pipeline = self.pipeline
        source = f"stage {stage - 1}" if stage else "the micro-batch"
        where = f"stage {stage} on rank {pipeline.rank}, micro-batch {i}"
        try:
            output = pipeline.stages[stage](x)
        except Exception as error:
            raise ScheduleError(f"{where}: the stage failed on what {source} gives, {describe(x.shape, x.dtype)}: "
                                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}") from error
        if not isinstance(output, torch.Tensor):
            raise ScheduleError(f"{where}: the stage put out a {type(output).__name__}; a stage gives one tensor")
        return output

    def _backward(self, action: Action) -> None:
        pipeline, stage, i = self.pipeline, action.stage, action.index
        x, output = self.graphs.pop((stage, i))
        grad = None if stage + 1 == pipeline.schedule.stages else self._take(Action(Op.RECV_B, stage, i))
        if action.op is Op.I:
            of_x, self.halves[stage, i] = backward_input(output, grad, x, pipeline._params[stage])
        else:
            if output.requires_grad:
                output.backward(grad)
            of_x = x.grad
        if stage > 0:
            self.out[Action(Op.RECV_B, stage - 1, i)] = torch.zeros_like(x) if of_x is None else of_x
