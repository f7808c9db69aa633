"""Run joint schedules on emulated devices and real wires, and measure in the same run what their actions cost."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from course_lib import launch, record
from course_lib.launch.fabric import Fabric
from course_lib.launch.measure import measure
from course_lib.link_cost import LinkCost
from course_lib.schedule.action import WHOLE, Schedule
from course_lib.schedule.degrees import Degrees
from course_lib.schedule.emulated import EmulatedStage
from course_lib.schedule.execute import Pipeline
from course_lib.schedule.grid import Grid, grid
from course_lib.schedule.measure import measure_message
from course_lib.schedule.split import backward_input
from course_lib.simulate.pipeline import Costs
from course_lib.tensor.regions import all_reduce, copy
from course_lib.timeline import Timeline
from course_lib.train.emulated import PROVENANCE


@dataclass(frozen=True)
class Work:
    """What a stage is on one rank: ms of the emulated device for F, I and W of a micro-batch, float32 elements of its
    parameters, in a layer for each bucket, and of what it passes on. Tensor-parallel ranks add an all-reduce of the
    latter to F and I."""

    F_ms: float = 40.0
    I_ms: float = 40.0
    W_ms: float = 40.0
    parameters: int = 2**18
    activations: int = 2**12


WORK, CUBE = Work(), Degrees(2, 2, 2)
SLOW_UPLINK = Fabric(gbit=1.0, latency_us=100, nodes=2, inter_gbit=0.045, inter_latency_us=500, kind="paced")
"""Two nodes with a slow wire between: it carries a MB in 0.19 s."""


@dataclass(frozen=True)
class Measured:
    """`timelines[name]` has one entry a round, of all ranks, with the updates as steps 0, 1, …; `costs` are those of
    the same run, measured while all ranks were busy."""

    timelines: dict[str, tuple[Timeline, ...]]
    costs: Costs
    degrees: Degrees


def measure_joint(schedules: Mapping[str, Schedule], degrees: Degrees = CUBE, work: Work = WORK,
                  fabric: str | Fabric = SLOW_UPLINK, updates: int = 4, rounds: int = 1,
                  timeout_s: float = 300.0) -> Measured:
    """Run every schedule for `updates` updates on end, all of them in turn in each of `rounds` rounds.

    The schedules have one placement, number of micro-batches and of buckets, and are for `degrees.pipeline` ranks.
    Raises `ScheduleError` for one that cannot run and what `launch.run` raises."""
    found = launch.run(run_on_a_rank, dict(schedules), degrees, work, updates, rounds, ranks=degrees.ranks,
                       fabric=fabric, timeout_s=timeout_s)
    timelines = {name: tuple(Timeline.merge(own[name][k] for _, own in found) for k in range(rounds))
                 for name in schedules}
    return Measured(timelines, found[0][0], degrees)


class JointStage(nn.Module):
    """An emulated stage of `layers` layers whose forward and input gradient end in an all-reduce over its
    tensor-parallel ranks."""

    def __init__(self, work: Work, layers: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.stage = nn.Sequential(*(EmulatedStage(work.F_ms / layers, work.I_ms / layers, work.W_ms / layers,
                                                   work.parameters // layers) for _ in range(layers)))
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shards = dist.get_world_size(self.group)
        return self.stage(x) if shards == 1 else all_reduce(self.stage(copy(x, self.group)) / shards, self.group)


def run_on_a_rank(schedules: dict[str, Schedule], degrees: Degrees, work: Work, updates: int,
                  rounds: int) -> tuple[Costs, dict[str, list[Timeline]]]:
    """This rank's part of `measure_joint`: the costs, the same on every rank, and its timelines, one a round."""
    torch.set_num_threads(1)
    place, provenance = grid(degrees), f"{PROVENANCE}, {launch.context().spec.provenance}"
    pipelines = {name: _pipeline(schedule, place, work) for name, schedule in schedules.items()}
    first = next(iter(schedules.values()))
    window, terms = [(torch.ones(work.activations),)] * first.micro_batches, first.micro_batches * degrees.data
    costs, out = [], {name: [] for name in schedules}
    for pipeline in pipelines.values():  # the first pass tells shapes and opens connections
        pipeline.run(window, terms)
    for _ in range(rounds):
        costs.append(_costs(place, work, first))
        for name, pipeline in pipelines.items():
            dist.barrier()
            with record.recording(dist.get_rank(), provenance) as recorder:
                for k in range(updates):
                    with recorder.measure_step(k):
                        pipeline.run(window, terms)
            pipeline.flush()
            out[name].append(recorder.timeline())
    return _median(costs, work), out


def _pipeline(schedule: Schedule, place: Grid, work: Work) -> Pipeline:
    stages = {s: JointStage(work, schedule.buckets[s], place.tensor) for s in schedule.stages_of(place.stage)}
    optimizers: dict[tuple[int, int], torch.optim.SGD] = {}

    def step(stage: int, bucket: int = WHOLE) -> None:
        if (stage, bucket) not in optimizers:
            params = pipeline.parameters(stage, bucket)
            optimizers[stage, bucket] = torch.optim.SGD(params, lr=1e-3) if params else None
        if (optimizer := optimizers[stage, bucket]) is not None:
            optimizer.step()
            optimizer.zero_grad()

    pipeline = Pipeline(schedule, stages, lambda output, _: output.sum(), group=place.pipeline, replicas=place.data,
                        step=step)
    return pipeline


def _costs(place: Grid, work: Work, schedule: Schedule) -> list[float]:
    """Seconds of F, I, W, a message's latency and its bytes' share, a gather of a stage, a reduction of a bucket, and
    a step of a stage. All ranks do each at the same time; every rank gets the mean over all."""
    found = _actions(JointStage(work, max(schedule.buckets), place.tensor), work)
    size = 4 * work.parameters
    link = LinkCost(0.0, 0.0)
    if dist.get_world_size(place.pipeline) > 1:
        link = measure_message((work.activations, 4 * work.activations), busy_ms=work.F_ms, turns=3, repeats=1,
                               group=place.pipeline)
    found += [link.a_s, link.beta_s_per_byte, *_collectives(place, size, schedule), _step_s(work, place)]
    mean = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()


def _actions(stage: JointStage, work: Work, turns: int = 3) -> list[float]:
    times: list[list[float]] = [[], [], []]
    for _ in range(turns):
        x = torch.ones(work.activations, requires_grad=True)
        at = [record.now()]
        output = stage(x)
        at.append(record.now())
        _, rest = backward_input(output, torch.ones_like(output), x, list(stage.parameters()))
        at.append(record.now())
        rest.run()
        at.append(record.now())
        for own, a, b in zip(times, at, at[1:]):
            own.append((b - a) / 1e9)
    return [statistics.median(own) for own in times]


def _collectives(place: Grid, size: int, schedule: Schedule) -> list[float]:
    """A gather of `size` bytes in its buckets, and a reduction of one bucket."""
    if dist.get_world_size(place.data) == 1:
        return [0.0, 0.0]
    buckets = max(schedule.buckets)
    each = size // buckets
    return [times * measure(kind, (each // 2, each), repeats=1, group=place.data).cost(each)
            for kind, times in (("all_gather", buckets), ("reduce_scatter", 1))]


def _step_s(work: Work, place: Grid) -> float:
    shard = nn.Parameter(torch.zeros(-(-work.parameters // dist.get_world_size(place.data))))
    optimizer = torch.optim.SGD([shard], lr=1e-3)
    times = []
    for _ in range(3):
        shard.grad = torch.zeros_like(shard)
        start = record.now()
        optimizer.step()
        times.append((record.now() - start) / 1e9)
    return statistics.median(times)


def _median(rounds: list[list[float]], work: Work) -> Costs:
    F, I, W, a, beta, gather, reduce, step = (statistics.median(values) for values in zip(*rounds))  # noqa: E741
    return Costs(F=F, I=I, W=W, link=LinkCost(a, beta), message_bytes=4 * work.activations, gather=gather,
                 reduce=reduce, step=step)
