"""Run a schedule on ranks: each does its own list, in order, on stages that are ordinary modules.

    pipeline = Pipeline(one_f_one_b(4, 8), {rank: stage}, loss_of)
    pipeline.run(window, denominator=tokens_of_the_whole_window)
    optimizer.step()

Sends go on at once and receives are posted where the schedule says, so that messages travel under compute.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from course_lib.schedule.action import (
    LAST_USE,
    WHOLE,
    Action,
    Op,
    Schedule,
    ScheduleError,
)
from course_lib.schedule.check import check
from course_lib.schedule.clock import Clock
from course_lib.schedule.cycle import carried, covers, held_over
from course_lib.schedule.experts import Exchange
from course_lib.schedule.mail import Mail, Shapes
from course_lib.schedule.messages import with_messages
from course_lib.schedule.one_pass import LossOf, Pass
from course_lib.schedule.replicas import Replicas, parts_of
from course_lib.schedule.sharded import Sharded
from course_lib.schedule.tied import Tied, Ties
from course_lib.train.base import Strategy
from course_lib.train.broadcast import broadcast_module
from course_lib.train.control import Control, ranks_text
from course_lib.train.window import total_of


class Pipeline:
    """The part of one rank in a pipeline.

    `stages` maps the numbers of this rank's stages to modules; each takes one tensor and gives one tensor. The first
    stage takes `batch[0]` of a micro-batch; `loss_of(output, batch)` turns what the last stage puts out into the
    *summed* loss of the micro-batch. `group` holds the ranks of this pipeline in order (default: all ranks),
    `replicas` the ranks that hold the same stages in other pipelines: they start from the parameters of the first of
    them, and the schedule must reduce (`add_reductions`). Where it gathers parameters too (`add_gathers`), they are
    sharded over the replicas (ZeRO-3). `step(stage)` is called for a `step` action, `step(stage, bucket)` for that of
    one bucket; an optimizer holds `parameters(stage)` or `parameters(stage, bucket)`. Steps that a schedule carries
    into the next pass (`cycle`) are done there, or by `flush()` after the last. `ties` lists weights that stages on
    different ranks share, each as the (stage, name) of its uses: their gradients are summed at the end of a window.
    `exchange[s]` sends what stage s gives to other ranks on its way to stage s + 1 of this rank, and gradients back
    (`experts`).

    Every rank of the pipeline makes one at the same point. The schedule is checked, and messages are added where it
    has none, before anything runs. Raises `ScheduleError` for a schedule that cannot run or stages that do not fit.
    """

    def __init__(self, schedule: Schedule, stages: Mapping[int, nn.Module], loss_of: LossOf, *,
                 group: dist.ProcessGroup | None = None, replicas: dist.ProcessGroup | None = None,
                 step: Callable[..., None] | None = None, ties: Ties = (),
                 exchange: Mapping[int, Exchange] | None = None) -> None:
        group = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(group)
        schedule = with_messages(schedule)
        check(schedule)
        self.schedule, self.stages, self.loss_of, self._step = schedule, dict(stages), loss_of, step
        self.exchange = dict(exchange or {})
        self._refuse(group, replicas, ties)
        name = self._agree(group)
        if replicas is not None:
            self._agree(replicas)
        self._actions = schedule.ranks[self.rank]
        self._carried, self._held_over = carried(schedule, self.rank), held_over(schedule, self.rank)
        self._owed: set[Action] = set()  # carried steps whose gradient is there or on its way
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

    def parameters(self, stage: int, bucket: int = WHOLE) -> list[nn.Parameter]:
        """What an optimizer of the stage, or of one bucket of it, holds: parameters, or where they are sharded this
        rank's shards."""
        if self._over is not None:
            return self._over.parameters(stage, bucket)
        if bucket != WHOLE:
            return parts_of(self._in_order(), dict(enumerate(self.schedule.buckets)))[stage, bucket]
        return [p for p in self._params[stage] if p.requires_grad]

    def flush(self) -> None:
        """Do the steps that the last pass left for the next. Every replica calls it, before parameters are read or
        saved; harmless where there are none."""
        for action in self._carried:
            self._step_of(action)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside the block every parameter of this rank's stages is whole and up to date, for reading. Every replica
        calls it between passes."""
        self.flush()
        if not isinstance(self._over, Sharded):
            yield
            return
        mine = [key for s in self.stages for key in self._keys(Action(Op.GATHER, s))]
        missing = {s for s, b in self._over.missing(mine)}
        for stage in self.stages:
            self._over.free(stage)  # what is still whole may be from before the last step
        self._over.gather(mine)
        for stage in self.stages:
            for work in self._over.coming(stage):
                work.wait()
        try:
            yield
        finally:
            for stage in missing:
                self._over.free(stage)

    def _keys(self, action: Action) -> list[tuple[int, int]]:
        return [(action.stage, part) for part in covers(self.schedule, action)]

    def _step_of(self, action: Action) -> None:
        """Step, unless it is of the pass before and that left no gradient: there was none, or it was not the last of
        its update."""
        if action in self._carried:
            if action not in self._owed:
                return
            self._owed.remove(action)
        if self._over is not None:
            self._over.finish(self._keys(action))
            self._clock.mark()
        self._step(action.stage) if action.index == WHOLE else self._step(action.stage, action.index)

    def _in_order(self) -> dict[int, nn.Module]:
        """The stages in the order in which their last backward is done."""
        last = {a.stage: k for k, a in enumerate(self._actions) if a.op in LAST_USE}
        return {stage: self.stages[stage] for stage in sorted(last, key=last.__getitem__)}

    def _spread(self, replicas: dist.ProcessGroup) -> Replicas | Sharded:
        for module in self.stages.values():
            broadcast_module(module, replicas)
        kind = Sharded if any(a.op is Op.GATHER for a in self._actions) else Replicas
        return kind(self._in_order(), dict(enumerate(self.schedule.buckets)), replicas)

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
        if far := [s for s in self.exchange if not {s, s + 1} <= set(self.stages)]:
            raise ScheduleError(f"exchange[{far[0]}] is between stages {far[0]} and {far[0] + 1}, which are not both "
                                f"on rank {self.rank}; between ranks they send messages already")
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

    def run(self, window: Sequence[Any], denominator: float, last: bool = True) -> float | torch.Tensor:
        """One pass of the schedule over its micro-batches; gradients are added to `.grad`.

        `denominator` is what the summed losses are divided by: the terms (tokens, samples) of the *whole* window, over
        all passes of this update and all replicas. Where an update takes several passes, all but the last have
        `last=False` and leave reductions and steps out. Only the ranks of the first and the last stage look into
        the micro-batches. Returns this rank's share of the loss, on a GPU as a tensor there. Raises `ScheduleError` for
        another number of micro-batches than the schedule's, and naming stage, rank and shapes for a stage that fails.
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
        one = Pass(self, window, denominator)
        if isinstance(self._over, Sharded):
            self._over.gather(sorted(self._held_over))  # before the first pass there was none to do it
        self._clock.begin()
        for action in self._actions:
            if last or action.op not in (Op.REDUCE, Op.STEP) or action in self._owed:
                with self._clock.action(action, self.schedule.name(action)):
                    one.do(action)
        if last:
            self._owed |= set(self._carried)
        if self._over is not None:
            later = {key for action in self._owed for key in self._keys(action)}
            self._over.finish(key for s in self.stages for key in self._keys(Action(Op.STEP, s)) if key not in later)
        if last:
            self._tied.sum()
        self._mail.finish()
        self._clock.end()
        self._under_way = False
        return total_of(one.losses)
