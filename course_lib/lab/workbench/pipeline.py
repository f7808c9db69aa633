"""Pipelines on real ranks and real wires: schedules of the learner, of the library and of torch, in alternation.

The stages are emulated; what a rank keeps and what it computes is real. Activations are counted where they live: a
mark saves a tensor for the backward of every micro-batch, and autograd lets go of it when that is done.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from course_lib.launch import Fabric
from course_lib.link_cost import LinkCost
from course_lib.schedule.action import Schedule
from course_lib.simulate.pipeline import FREE, Costs, Prediction, bubble, predict
from course_lib.timeline import Timeline
from course_lib.tune.sweep import Measured


@dataclass(frozen=True)
class PipelineRun(Measured):
    """One schedule. `bubbles` has the bubble of each repetition, `kept` the most activations that each rank held, in
    micro-batches of all its stages; `from_reference` is the largest difference of a gradient element from those of a
    single process, as a fraction of the largest."""

    bubbles: tuple[float, ...]
    kept: tuple[float, ...]
    from_reference: float

    @property
    def bubble(self) -> float:
        return statistics.median(self.bubbles)


@dataclass(frozen=True)
class Pipelines:
    """All runs by name, the cost of one message on these ranks, and what a stage costs."""

    runs: dict[str, PipelineRun]
    link: LinkCost
    message_bytes: int
    stage_ms: tuple[float, float, float]

    def costs(self, v: int = 1) -> Costs:
        """Of one of v stages a rank: each has a v-th of a rank's work, and sends messages of the same size."""
        return Costs(*(ms / v / 1e3 for ms in self.stage_ms), link=self.link, message_bytes=self.message_bytes)

    def predict(self, schedule: Schedule) -> Prediction:
        return predict(schedule, self.costs(schedule.stages // len(schedule.ranks)))


def pipeline_runs(schedules: Mapping[str, Schedule], twins: Mapping[str, tuple[str, int, int]] | None = None, *,
                  stage_ms: tuple[float, float, float] = (6.0, 6.0, 6.0), message_kb: float = 64,
                  fabric: str | Fabric = "auto", repeats: int = 5, timeout_s: float = 120.0) -> Pipelines:
    """Run every schedule `repeats` times in alternation, on as many ranks as they have (the same for all).

    `stage_ms` are F, I and W of all that one rank holds, for one micro-batch; B is I and W. `twins` are torch's own:
    {name: (kind, micro-batches, stages a rank)}, of the kinds of `pipeline_twin`.
    Raises `ScheduleError` for a schedule that cannot run, before any rank starts, and `OwnRunFailed` with one
    sentence for what goes wrong on a rank.
    """
    from course_lib.lab.workbench.buckets import _run
    from course_lib.schedule.check import check
    from course_lib.schedule.messages import with_messages

    for schedule in schedules.values():
        check(with_messages(schedule))
    (ranks,) = {len(schedule.ranks) for schedule in schedules.values()}
    elements = max(4, round(message_kb * 1024 / 4))
    rows = _run(_on_rank, dict(schedules), dict(twins or {}), stage_ms, elements, repeats, ranks=ranks, fabric=fabric,
                timeout_s=timeout_s)  # fmt: skip
    link, seconds, _, _, worst = rows[0]
    runs = {}
    for name in seconds:
        timeline = Timeline.merge(row[2][name] for row in rows)
        bubbles = tuple(bubble(timeline.select(step=step)) for step in timeline.steps)
        runs[name] = PipelineRun(name, tuple(seconds[name]), timeline, bubbles, tuple(row[3][name] for row in rows),
                                 worst[name])  # fmt: skip
    return Pipelines(runs, link, 4 * elements, stage_ms)


def _on_rank(schedules, twins, stage_ms, elements, repeats):
    import torch
    import torch.distributed as dist

    from course_lib.launch import context, control_group
    from course_lib.schedule.measure import measure_message
    from course_lib.train.emulated import PROVENANCE
    from course_lib.tune.alternate import Step, alternate

    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    link = measure_message((elements, 4 * elements), turns=4, repeats=1) if ranks > 1 else FREE
    parts = {name: _ours(schedule, stage_ms, elements) for name, schedule in schedules.items()}
    parts |= {name: _torchs(*twin, stage_ms, elements) for name, twin in twins.items()}
    steps = {name: Step(part.run, part.prepare) for name, part in parts.items()}
    seconds, lines = alternate(steps, repeats, 1, f"{PROVENANCE}, {context().spec.provenance}")
    off = torch.tensor([part.from_reference() for part in parts.values()], dtype=torch.float64)
    dist.all_reduce(off, op=dist.ReduceOp.MAX, group=control_group())
    return link, seconds, lines, {name: part.kept() for name, part in parts.items()}, dict(zip(parts, off.tolist()))


class Live:
    """How many micro-batches have something saved now, and had at most."""

    def __init__(self) -> None:
        self.now = self.most = 0


class Kept:
    """A saved tensor; autograd lets go of it when its micro-batch needs it no more."""

    def __init__(self, tensor, live: Live) -> None:
        self.tensor, self._live = tensor, live
        live.now += 1
        live.most = max(live.most, live.now)

    def __del__(self) -> None:
        self._live.now -= 1


def counted(stage, live: Live):
    """The stage, with a mark at its input that saves one tensor a micro-batch, which `live` counts."""
    import torch

    class Mark(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Counted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stage = stage

        def forward(self, x):
            x = x if x.requires_grad else x.detach().requires_grad_()
            with torch.autograd.graph.saved_tensors_hooks(lambda kept: Kept(kept, live), lambda kept: kept.tensor):
                x = Mark.apply(x)
            return self.stage(x)

    return Counted()


class _Part:
    """One way of running the pipeline on this rank: its stages, its window, and what the gradients must be."""

    def __init__(self, numbers: Sequence[int], count: int, m: int, stage_ms, elements: int) -> None:
        import torch
        import torch.distributed as dist

        from course_lib.schedule.emulated import EmulatedStage

        v, self.live, self.m, self.count = count // dist.get_world_size(), Live(), m, count
        self.stages = {s: counted(EmulatedStage(*(ms / v for ms in stage_ms)), self.live) for s in numbers}
        wave = torch.linspace(-1, 1, elements).unsqueeze(0)
        self.window = [wave.roll(7 * i, 1) * (1 + i / m) for i in range(m)]
        self.feed, self.pipeline = self.window, None

    def prepare(self) -> None:
        for stage in self.stages.values():
            stage.zero_grad()

    def run(self) -> None:
        self.pipeline.run(self.feed, self.m)

    def kept(self) -> float:
        return self.live.most / len(self.stages)

    def from_reference(self) -> float:
        """Against all stages in this one process, one micro-batch after the other."""
        import torch

        from course_lib.schedule.emulated import EmulatedStage

        whole = torch.nn.Sequential(*(EmulatedStage(0, 0, 0) for _ in range(self.count)))
        for x in self.window:
            (loss_of(whole(x)) / self.m).backward()
        right = [whole[s].weight.grad for s in self.stages]
        mine = [stage.stage.weight.grad for stage in self.stages.values()]
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, right))


def loss_of(output, _batch=None):
    return output.square().mean()


def _ours(schedule, stage_ms, elements) -> _Part:
    import torch.distributed as dist

    from course_lib.schedule.execute import Pipeline

    part = _Part(schedule.stages_of(dist.get_rank()), schedule.stages, schedule.micro_batches, stage_ms, elements)
    part.feed = [(x,) for x in part.window]
    part.pipeline = Pipeline(schedule, part.stages, loss_of)
    return part


def _torchs(kind, m, v, stage_ms, elements) -> _Part:
    import torch.distributed as dist

    from course_lib.lab.workbench.pipeline_twin import TorchPipeline

    rank, ranks = dist.get_rank(), dist.get_world_size()
    numbers = (rank, 2 * ranks - 1 - rank) if kind == "ZB-V" else range(rank, ranks * v, ranks)
    part = _Part(numbers, ranks * v, m, stage_ms, elements)
    part.pipeline = TorchPipeline(kind, part.stages, ranks * v, m, loss_of, part.window[0])
    return part
