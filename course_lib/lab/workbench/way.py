"""The whole way on one set of ranks: all-reduce after every micro-step, once, in buckets, and the joint schedule.

Four ranks on two nodes, the same stages, the same micro-batches an update, the same compute for every rank. The first
three replicate the model on every rank; the joint schedule cuts it into a pipeline over the ranks of a node, and
shards it over the nodes. They run in alternation, some updates on end each.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from course_lib.launch import Fabric
from course_lib.schedule.action import Op, Schedule
from course_lib.schedule.degrees import Degrees
from course_lib.score import Score, fair_score
from course_lib.simulate.pipeline import Costs, updates
from course_lib.spread import half_iqr
from course_lib.timeline import Span, Timeline

EVERY, ONCE, BUCKETS, JOINT = "serial", "no_sync", "buckets", "joint"
DEGREES = Degrees(2, 1, 2)


@dataclass(frozen=True)
class WayRun:
    """One way of training. `updates_s` are seconds of every update but the first of each round, `timeline` is one round
    of all ranks with its updates as steps."""

    name: str
    updates_s: tuple[float, ...]
    timeline: Timeline

    @property
    def median_s(self) -> float:
        return statistics.median(self.updates_s)

    @property
    def spread_s(self) -> float:
        """Half the distance between the quartiles, seconds."""
        return half_iqr(self.updates_s)

    @property
    def one_update(self) -> Timeline:
        """`one_update` of its timeline."""
        return one_update(self.timeline)


@dataclass(frozen=True)
class Way:
    """The four runs in order. Tc: all compute of an update on a rank, Tm: one flat all-reduce of the whole gradient,
    joint_Tm: what the busiest rank of the joint schedule sends. Seconds, all of one run."""

    runs: dict[str, WayRun]
    Tc: float
    Tm: float
    joint_Tm: float

    def __getitem__(self, name: str) -> WayRun:
        return self.runs[name]

    def fair_score(self, name: str) -> Score:
        """F against the first run, which reduces after every micro-step; each with the traffic of its own layout."""
        one = self.runs[name]
        return fair_score(self.runs[EVERY].median_s, one.median_s, self.Tc, self.joint_Tm if name == JOINT else self.Tm,
                          spread=one.spread_s)


def way_runs(joint: Schedule, *, action_ms: float = 8.0, stage_kb: float = 256, fabric: str | Fabric = "auto",
             passes: int = 4, rounds: int = 2, timeout_s: float = 300.0) -> Way:
    """Measure all four. `joint` is for two ranks; F, I and W of a stage take `action_ms` each, its parameters
    `stage_kb` KB. A replica of the first three does as many micro-steps as give a rank the same compute.

    Raises `ValueError` for a schedule of other than two ranks or an odd number of micro-batches, and `OwnRunFailed`
    with one sentence for what goes wrong on a rank."""
    from course_lib.lab.workbench.buckets import _run

    if len(joint.ranks) != DEGREES.pipeline or joint.micro_batches % DEGREES.pipeline:
        raise ValueError(f"way_runs: a schedule of {len(joint.ranks)} ranks and {joint.micro_batches} micro-batches; "
                         f"give one for {DEGREES.pipeline} ranks and an even number")
    rows = _run(_on_rank, joint, action_ms, round(stage_kb * 256), passes, rounds, ranks=DEGREES.ranks,
                fabric=fabric, timeout_s=timeout_s)  # fmt: skip
    costs, Tm, Tc, _ = rows[0]
    runs = {}
    for name in rows[0][3]:
        lines = [Timeline.merge(row[3][name][k] for row in rows) for k in range(rounds)]
        took = tuple(seconds for line in lines for seconds in updates(line))
        typical = min(lines, key=lambda line: abs(statistics.median(updates(line)) - statistics.median(took)))
        runs[name] = WayRun(name, took, typical)
    return Way(runs, Tc, Tm, traffic_s(joint, costs))


def one_update(timeline: Timeline) -> Timeline:
    """What rank 0 does from the begin of its second pass to that of its third, whatever pass it belongs to: under a
    joint schedule one pass does what is left of another. Raises `ValueError` for fewer than three passes."""
    begins = sorted(span.start for span in timeline.select(rank=0, kind="step"))
    if len(begins) < 3:
        raise ValueError(f"one_update: {len(begins)} passes; a whole update takes the begin of three")
    first, last = begins[1:3]
    inside = [span._replace(start=max(span.start, first), stop=min(span.stop, last), step=1)
              for span in timeline.select(rank=0) if span.kind != "step" and span.start < last and span.stop > first]
    return Timeline.of([*inside, Span(0, "step", "step", "step 1", first, last, -1, -1, 1)], timeline.provenance)


def traffic_s(schedule: Schedule, costs: Costs) -> float:
    """Seconds for which reductions and gathers keep the wire of the busiest rank in an update."""
    return max(sum(costs.action_ns(schedule, a) for a in actions if a.op in (Op.REDUCE, Op.GATHER))
               for actions in schedule.ranks) / 1e9


def _on_rank(joint: Schedule, action_ms: float, elements: int, passes: int,
             rounds: int) -> tuple[Costs, float, float, dict[str, list[Timeline]]]:
    """The rank's side: costs and the joint schedule, and the replicated ways, a round of each in turn."""
    import torch
    import torch.distributed as dist

    from course_lib.launch import context, control_group
    from course_lib.record import now, recording
    from course_lib.schedule.measured import Work, run_on_a_rank
    from course_lib.train.emulated import PROVENANCE, equal
    from course_lib.tune.sweep import MB, tiny_micro_step
    from course_lib.tune.update import Updates

    parts = joint.stages * joint.buckets[0]
    layer = {"layers": parts, "mb": joint.stages * elements * 4 / parts / MB,
             "forward_ms": action_ms * joint.stages / parts, "backward_ms": 2 * action_ms * joint.stages / parts}
    made = Updates(lambda: equal(**layer), tiny_micro_step, joint.micro_batches // DEGREES.pipeline)
    cap = 2 * layer["mb"]
    steps = {EVERY: made.of("serial", {"flat": True}, every=True), ONCE: made.of("no_sync", {}),
             BUCKETS: made.of("bucketed", {"bucket_mb": cap, "first_bucket_mb": None})}
    compute, flat = made.compute(), made.communication(joint.stages * elements * 4)
    work = Work(action_ms, action_ms, action_ms, parameters=elements, activations=2**10)
    lines: dict[str, list[Timeline]] = {name: [] for name in (*steps, JOINT)}
    alone: dict[str, list[float]] = {"Tm": [], "Tc": []}
    for step in steps.values():  # buckets are rebuilt and connections made
        step.prepare()
        step.run()
    provenance = f"{PROVENANCE}, {context().spec.provenance}"
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier(control_group())
            with recording(dist.get_rank(), provenance) as recorder:
                for k in range(passes):
                    step.prepare()
                    with recorder.measure_step(k):
                        step.run()
            lines[name].append(recorder.timeline())
        for name, step in (("Tm", flat), ("Tc", compute)):
            step.prepare()
            dist.barrier(control_group())
            start = now()
            step.run()
            took = torch.tensor([(now() - start) * 1e-9], dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX, group=control_group())
            alone[name].append(float(took))
        costs, own = run_on_a_rank({JOINT: joint}, DEGREES, work, passes, 1)
        lines[JOINT] += own[JOINT]
    return costs, statistics.median(alone["Tm"]), statistics.median(alone["Tc"]), lines
