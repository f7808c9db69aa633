"""Joint schedules on real ranks and real wires, several in alternation, with what their actions cost in the same run.

The stages are emulated; parameters, gradients, messages and collectives are real. Beside the timed runs, small stages
of no duration are trained by every schedule and by one process, and their parameters are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from course_lib.launch import Fabric
from course_lib.schedule.action import Op, Schedule
from course_lib.schedule.degrees import Degrees
from course_lib.simulate.bound import Bound, bound
from course_lib.simulate.pipeline import Costs, period, predict, updates
from course_lib.spread import half_iqr
from course_lib.timeline import Timeline, intersect, length, union

if TYPE_CHECKING:
    from course_lib.schedule.grid import Grid

SAME_UPDATES = 3
_DATA = "reduce", "gather", "all_gather"
"""How spans of data-parallel collectives begin, measured (`reduce_scatter`) and predicted (`reduce0@2`)."""


@dataclass(frozen=True)
class JointRun:
    """One schedule. `updates_s` are seconds of every update but the first of each round; `timeline` is one round of all
    ranks; `from_reference` is the largest difference of a parameter from those of one process after
    `SAME_UPDATES` updates, as a part of the largest."""

    name: str
    schedule: Schedule
    updates_s: tuple[float, ...]
    timeline: Timeline
    from_reference: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.updates_s)

    @property
    def spread_s(self) -> float:
        """Half the distance between the quartiles, seconds."""
        return half_iqr(self.updates_s)

    @property
    def hidden(self) -> float:
        """`hidden_share` of what was measured."""
        return hidden_share(self.timeline)


@dataclass(frozen=True)
class JointRuns:
    """All schedules by name, and the costs of the same run."""

    runs: dict[str, JointRun]
    costs: Costs
    degrees: Degrees

    def __getitem__(self, name: str) -> JointRun:
        return self.runs[name]

    def predicted_s(self, name: str) -> float:
        """Seconds of an update by the simulator, with the costs of this run."""
        return period(self.runs[name].schedule, self.costs)

    def predicted_hidden(self, name: str) -> float:
        """`hidden_share` by the simulator, with the costs of this run."""
        return hidden_share(predict(self.runs[name].schedule, self.costs, 4).timeline)

    def bound(self, name: str) -> Bound:
        return bound(self.runs[name].schedule, self.costs)

    def traffic_s(self, name: str, ops: Sequence[Op] = (Op.REDUCE, Op.GATHER)) -> float:
        """Seconds for which reductions and gathers of an update keep the wire of the busiest rank."""
        schedule = self.runs[name].schedule
        return max(sum(self.costs.action_ns(schedule, a) for a in actions if a.op in ops)
                   for actions in schedule.ranks) / 1e9

    def pair(self, name: str, passes: int = 3) -> tuple[Timeline, Timeline]:
        """(predicted, measured) of one pipeline, the same passes of both, in which the last carries nothing out."""
        run = self.runs[name]
        measured = self.degrees.one_pipeline(run.timeline)
        return predict(run.schedule, self.costs, passes).timeline, measured


def hidden_share(timeline: Timeline) -> float:
    """The part of the time of reductions and gathers in which their rank computes, over the passes between the first
    and the last."""
    inner = timeline.steps[1:-1]
    moved = hidden = 0
    for rank in timeline.ranks:
        mine = timeline.select(rank=rank)
        compute = union(mine.select(kind="compute").intervals())
        wire = union(Timeline.of((s for s in mine.select(kind="comm") if s.step in inner and s.name.startswith(_DATA)),
                                 mine.provenance).intervals())
        moved, hidden = moved + length(wire), hidden + length(intersect(wire, compute))
    return hidden / moved if moved else 0.0


def joint_runs(schedules: Mapping[str, Schedule], *, degrees: Degrees, action_ms: float = 8.0, stage_kb: float = 256,
               fabric: str | Fabric = "auto", passes: int = 4, rounds: int = 2,
               timeout_s: float = 300.0) -> JointRuns:
    """Run every schedule for `passes` updates on end, in turn, in each of `rounds` rounds.

    All schedules have the same stages and buckets, F, I and W of a stage take `action_ms` each, its parameters
    `stage_kb` KB. Raises `ScheduleError` for a schedule that cannot run, before any rank starts, and `OwnRunFailed`
    with one sentence for what goes wrong on a rank."""
    from course_lib.lab.workbench.buckets import _run
    from course_lib.schedule.check import check
    from course_lib.schedule.messages import with_messages

    for schedule in schedules.values():
        check(with_messages(schedule))
    rows = _run(_on_rank, dict(schedules), degrees, action_ms, round(stage_kb * 256), passes, rounds,
                ranks=degrees.ranks, fabric=fabric, timeout_s=timeout_s)  # fmt: skip
    costs, _, off = rows[0]
    runs = {}
    for name, schedule in schedules.items():
        lines = [Timeline.merge(row[1][name][k] for row in rows) for k in range(rounds)]
        took = tuple(seconds for line in lines for seconds in updates(line))
        typical = min(lines, key=lambda line: abs(statistics.median(updates(line)) - statistics.median(took)))
        runs[name] = JointRun(name, schedule, took, typical, off[name])
    return JointRuns(runs, costs, degrees)


def _on_rank(schedules: dict[str, Schedule], degrees: Degrees, action_ms: float, elements: int, passes: int,
             rounds: int) -> tuple[Costs, dict[str, list[Timeline]], dict[str, float]]:
    import torch
    import torch.distributed as dist

    from course_lib.launch import control_group
    from course_lib.schedule.grid import grid
    from course_lib.schedule.measured import Work, run_on_a_rank

    work = Work(action_ms, action_ms, action_ms, parameters=elements, activations=2**10)
    costs, lines = run_on_a_rank(schedules, degrees, work, passes, rounds)
    place = grid(degrees)
    off = torch.tensor([_from_reference(schedule, degrees, place) for schedule in schedules.values()],
                       dtype=torch.float64)
    dist.all_reduce(off, op=dist.ReduceOp.MAX, group=control_group())
    return costs, lines, dict(zip(schedules, off.tolist()))


def _from_reference(schedule: Schedule, degrees: Degrees, place: Grid) -> float:
    """Some updates of small stages under the schedule, and in one process."""
    import torch
    from torch import nn

    from course_lib.schedule.emulated import EmulatedStage
    from course_lib.schedule.execute import Pipeline

    def stage(number: int) -> nn.Module:
        return nn.Sequential(*(EmulatedStage(0, 0, 0, 6) for _ in range(schedule.buckets[number])))

    def loss_of(output: Any, _batch: Any = None) -> Any:
        return output.square().sum()

    m, rate = schedule.micro_batches, 0.5
    window = [torch.linspace(-1, 1, 8).roll(i) * (1 + i / m) for i in range(m * degrees.data)]
    mine, optimizers = {s: stage(s) for s in schedule.stages_of(place.stage)}, {}

    def step(*key: int) -> None:
        if key not in optimizers:
            params = pipeline.parameters(*key)
            optimizers[key] = torch.optim.SGD(params, lr=rate) if params else None
        if optimizers[key] is not None:
            optimizers[key].step()
            optimizers[key].zero_grad()

    pipeline = Pipeline(schedule, mine, loss_of, group=place.pipeline, replicas=place.data, step=step)
    whole = nn.ModuleList(stage(s) for s in range(schedule.stages))
    alone = torch.optim.SGD(whole.parameters(), lr=rate)
    own = [(x,) for x in window[place.replica * m:(place.replica + 1) * m]]
    for _ in range(SAME_UPDATES):
        pipeline.run(own, len(window))
        for x in window:
            y = x
            for each in whole:
                y = each(y)
            (loss_of(y) / len(window)).backward()
        alone.step()
        alone.zero_grad()
    with pipeline.gathered(), torch.no_grad():
        pairs = [(a, b) for s, module in mine.items() for a, b in zip(module.parameters(), whole[s].parameters())]
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
