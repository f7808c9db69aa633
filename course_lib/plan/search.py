"""Every layout of a model on a cluster, each with its memory and time, and why the others cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from course_lib.plan.footprint import Footprint, footprint, usable, why_not
from course_lib.plan.hardware import Cluster
from course_lib.plan.layout import Layout, split
from course_lib.plan.published import memory_shortfall
from course_lib.plan.shape import ModelShape
from course_lib.plan.timing import Step, step
from course_lib.plan.volumes import Impossible

MICRO_BATCHES = (1, 2, 4, 8, 16)
RECOMPUTED = ("none", "alternate", "full")
"""What is tried. `selective` is left out: attention is fused, which keeps no scores anyway."""


@dataclass(frozen=True)
class Plan:
    """A layout with what it takes. `refused` is "" if it fits the GPUs' memory, else why not; `tight` says that it
    would not if it took as much more than predicted as the published run that is worst predicted."""

    layout: Layout
    memory: Footprint
    step: Step
    refused: str
    tight: bool = False

    @property
    def fits(self) -> bool:
        return not self.refused


@dataclass(frozen=True)
class Found:
    """`fitting`: fastest first. `too_large`: those that need more memory than there is. `impossible`: for each way in
    which degrees did not divide what they must, how many layouts and one sentence."""

    fitting: tuple[Plan, ...]
    too_large: tuple[Plan, ...]
    impossible: tuple[tuple[int, str], ...]

    @property
    def best(self) -> Plan | None:
        return self.fitting[0] if self.fitting else None

    def best_by_degree(self) -> dict[int, Plan]:
        """For each data-parallel degree the fastest plan that fits, in order of the degree."""
        best: dict[int, Plan] = {}
        for plan in self.fitting:
            best.setdefault(plan.step.D, plan)
        return dict(sorted(best.items()))


def search(shape: ModelShape, cluster: Cluster, B: int, *, micro_batch: int | None = None, tensor: int | None = None,
           pipeline: int | None = None, data: int | None = None, stage: int | None = None) -> Found:
    """All layouts for updates of `B` rows. Degrees that are given are kept. Raises `Impossible` when none is possible,
    with the reasons that they have, the most frequent first."""
    plans, refused = [], dict[str, tuple[int, str]]()
    for layout in _layouts(shape, cluster, micro_batch, tensor, pipeline, data, stage):
        try:
            D, N = split(layout, shape, cluster.gpus, B)
        except Impossible as reason:
            kind = "".join(c for c in str(reason) if not c.isdigit())
            count, first = refused.get(kind, (0, str(reason)))
            refused[kind] = (count + 1, first)
            continue
        if D == 1 and layout.stage and stage is None:
            continue  # nothing to shard over: the same as stage 0
        memory = footprint(shape, layout, D, N)
        refusal = why_not(memory, cluster, layout)
        tight = not refusal and memory.total * memory_shortfall() > usable(cluster)
        plans.append(Plan(layout, memory, step(shape, cluster, layout, B), refusal, tight))
    impossible = tuple(sorted(refused.values(), reverse=True))
    if not plans:
        raise Impossible(_none_of(impossible) if impossible else
                         f"no layout of {cluster.gpus} GPUs has the degrees that were asked for: tensor · pipeline · "
                         f"data must be {cluster.gpus}")
    plans.sort(key=lambda plan: plan.step.total)
    return Found(tuple(p for p in plans if p.fits), tuple(p for p in plans if not p.fits), impossible)


def _none_of(impossible: tuple[tuple[int, str], ...]) -> str:
    if len(impossible) == 1:
        return impossible[0][1]
    reasons = "; ".join(f"{count}: {sentence}" for count, sentence in impossible)
    return f"none of {sum(count for count, _ in impossible)} layouts is possible. {reasons}"


def _layouts(shape: ModelShape, cluster: Cluster, micro_batch: int | None, tensor: int | None, pipeline: int | None,
             data: int | None, stage: int | None) -> Iterator[Layout]:
    gpus = cluster.gpus
    for t in _divisors(_left(gpus, pipeline)) if tensor is None else [tensor]:
        for p in _divisors(_left(gpus, t)) if pipeline is None else [pipeline]:
            if data is not None and t * p * data != gpus:
                continue
            parted = p > 1 and shape.layers % p == 0 and shape.heads % max(t, 1) == 0
            for v, b, z, recompute in product(_divisors(shape.layers // p) if parted else [1],
                                              MICRO_BATCHES if micro_batch is None else [micro_batch],
                                              range(4) if stage is None else [stage], RECOMPUTED):
                yield Layout(t, p, b, v, z, recompute)


def _left(gpus: int, degree: int | None) -> int:
    """GPUs for the other degrees; 1 where this one cannot be and `split` will say why."""
    if degree is None:
        return gpus
    return gpus // degree if degree > 0 and gpus % degree == 0 else 1


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def slower_because(plan: Plan, best: Plan) -> str:
    """By how much `plan` is slower than `best`, and which parts of the step make most of the difference."""
    lost = plan.step.total - best.step.total
    if lost <= 0:
        return "the fastest that fits"
    more = {part: seconds - best.step.parts()[part] for part, seconds in plan.step.parts().items()}
    most = sorted((part for part in more if more[part] > 0.1 * lost), key=more.__getitem__, reverse=True)
    details = ", ".join(f"{more[part]:.2f} s more {NAMES[part]}" for part in most)
    return f"{lost / best.step.total:.0%} slower: {details}"


NAMES = {"compute": "compute", "optimizer": "optimizer", "bubble": "pipeline bubble",
         "tensor": "exposed tensor-parallel traffic", "pipeline": "traffic between stages",
         "data": "exposed data-parallel traffic"}
"""The parts of a `Step` in words."""
