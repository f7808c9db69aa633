"""Every layout of a model on a cluster, each with its memory and time, and why the others cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from course_lib.plan.footprint import Footprint, footprint, why_not
from course_lib.plan.hardware import Cluster
from course_lib.plan.layout import Layout, split
from course_lib.plan.shape import ModelShape
from course_lib.plan.timing import Step, step
from course_lib.plan.volumes import Impossible

MICRO_BATCHES = (1, 2, 4, 8, 16)
RECOMPUTED = ("none", "alternate", "full")
"""What is tried. `selective` is left out: attention is fused, which keeps no scores anyway."""


@dataclass(frozen=True)
class Plan:
    """A layout with what it takes. `refused` is "" if it fits the GPUs' memory, else why not."""

    layout: Layout
    memory: Footprint
    step: Step
    refused: str

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

    def best_by_degree(self) -> dict[int, Plan]:
        """For each data-parallel degree the fastest plan that fits, in order of the degree."""
        best: dict[int, Plan] = {}
        for plan in self.fitting:
            best.setdefault(plan.step.D, plan)
        return dict(sorted(best.items()))


def search(shape: ModelShape, cluster: Cluster, B: int, *, micro_batch: int | None = None, tensor: int | None = None,
           pipeline: int | None = None, data: int | None = None, stage: int | None = None) -> Found:
    """All layouts for updates of `B` rows. Degrees that are given are kept. Raises `Impossible` when none is possible,
    with the reason that most of them have."""
    plans, refused = [], dict[str, tuple[int, str]]()
    for layout in _layouts(shape, cluster, micro_batch, tensor, pipeline, data, stage):
        try:
            D, N = split(layout, shape, cluster.gpus, B)
        except Impossible as reason:
            kind = "".join(c for c in str(reason) if not c.isdigit())
            refused[kind] = (refused.get(kind, (0, ""))[0] + 1, str(reason))
            continue
        if D == 1 and layout.stage:
            continue  # nothing to shard over: the same as stage 0
        memory = footprint(shape, layout, D, N)
        plans.append(Plan(layout, memory, step(shape, cluster, layout, B), why_not(memory, cluster, layout)))
    impossible = tuple(sorted(refused.values(), reverse=True))
    if not plans:
        raise Impossible(impossible[0][1] if impossible else
                         f"no layout of {cluster.gpus} GPUs has the degrees that were asked for: they must divide it")
    plans.sort(key=lambda plan: plan.step.total)
    return Found(tuple(p for p in plans if p.fits), tuple(p for p in plans if not p.fits), impossible)


def _layouts(shape: ModelShape, cluster: Cluster, micro_batch: int | None, tensor: int | None, pipeline: int | None,
             data: int | None, stage: int | None) -> Iterator[Layout]:
    gpus = cluster.gpus
    for t in [tensor] if tensor else _divisors(gpus):
        for p in [pipeline] if pipeline else _divisors(gpus // t if gpus % t == 0 else 1):
            if data and t * p * data != gpus:
                continue
            whole = shape.layers % p == 0 and shape.heads % t == 0
            for v in _divisors(shape.layers // p) if p > 1 and whole else [1]:
                for b in [micro_batch] if micro_batch else MICRO_BATCHES:
                    for z in range(4) if stage is None else [stage]:
                        for recompute in RECOMPUTED:
                            yield Layout(t, p, b, v, z, recompute)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def slower_because(plan: Plan, best: Plan) -> str:
    """Which part of the step makes `plan` slower than `best`."""
    lost = plan.step.total - best.step.total
    if lost <= 0:
        return "the fastest that fits"
    more = {part: seconds - best.step.parts()[part] for part, seconds in plan.step.parts().items()}
    part = max(more, key=more.__getitem__)
    return f"{lost / best.step.total:.0%} slower; {NAMES[part]} takes {more[part]:.2f} s more"


NAMES = {"compute": "compute", "optimizer": "the optimizer", "bubble": "the pipeline's bubble",
         "tensor": "exposed tensor-parallel traffic", "pipeline": "traffic between stages",
         "data": "exposed data-parallel traffic"}
"""The parts of a `Step` in words."""
