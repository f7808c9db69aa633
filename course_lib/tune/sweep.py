"""The bucket sweep: profile once, fit the wire, predict every size, measure them all in alternation."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from course_lib import overlap
from course_lib.launch import Fabric, run
from course_lib.link_cost import LinkCost
from course_lib.score import Score, attained, fair_score
from course_lib.simulate.buckets import (
    MB,
    BucketPlan,
    GradientProfile,
    Prediction,
    best_plan,
    predict,
    step_bound,
    step_floor,
    uniform_plan,
)
from course_lib.spread import half_iqr
from course_lib.timeline import Timeline

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Measured:
    """One variant: seconds of every repetition, and the timeline of all ranks with one step a repetition."""

    name: str
    seconds: tuple[float, ...]
    timeline: Timeline

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread_s(self) -> float:
        """Half the distance between the quartiles, seconds."""
        return half_iqr(self.seconds)

    @property
    def exposed_s(self) -> float:
        """Median over steps of the exposed communication of a rank, mean over ranks, seconds."""
        steps: dict[int, list[int]] = {}
        for row in overlap.report(self.timeline).rows:
            steps.setdefault(row.step, []).append(row.exposed or 0)
        return statistics.median(statistics.fmean(v) for v in steps.values()) * 1e-9


@dataclass(frozen=True)
class Sweep:
    """A bucket sweep on one fabric. Keys of `measured`: `compute`, `comm` (one flat all-reduce), `serial`,
    then one a bucket size (`"4 MB"`), `plan`, and DDP's where asked for (`"ddp 4 MB"`)."""

    profile: GradientProfile
    link: LinkCost
    plan: BucketPlan
    caps_mb: tuple[float, ...]
    measured: dict[str, Measured]

    @property
    def Tc(self) -> float:
        """All compute of one update, seconds."""
        return self.measured["compute"].median_s

    @property
    def Tm(self) -> float:
        """One flat all-reduce of the gradient, seconds."""
        return self.measured["comm"].median_s

    @property
    def r(self) -> float:
        return self.Tm / self.Tc

    def fair_score(self, name: str) -> Score:
        """F of a variant, against this sweep's own serial run."""
        one = self.measured[name]
        return fair_score(self.measured["serial"].median_s, one.median_s, self.Tc, self.Tm,
                                  spread=one.spread_s)

    def attained(self, name: str = "plan") -> Score:
        """A of a variant, against the best contiguous plan under the fitted costs."""
        one = self.measured[name]
        return attained(self.measured["serial"].median_s, one.median_s, step_bound(self.profile, self.link),
                                spread=one.spread_s)

    @property
    def floor_s(self) -> float:
        """No plan of any shape is faster than this, seconds."""
        return step_floor(self.profile, self.link)

    def prediction(self, cap_mb: float | None = None) -> Prediction:
        """What the profile and the wire say about one cap, or about the best plan."""
        plan = self.plan if cap_mb is None else uniform_plan(self.profile, cap_mb * MB)
        return predict(self.profile, self.link, plan)

    def points(self) -> list[tuple[float, float, float, float]]:
        """Measured (MB, median, low, high) in ms of every cap, for `show.curve` and the widget."""
        rows = [(cap, self.measured[label(cap)]) for cap in self.caps_mb]
        return [(cap, m.median_s * 1e3, (m.median_s - m.spread_s) * 1e3, (m.median_s + m.spread_s) * 1e3)
                for cap, m in rows]


def label(cap_mb: float) -> str:
    return f"{cap_mb:g} MB"


def sweep(model: Callable[[], nn.Module], caps_mb: Sequence[float] = (1, 2, 3, 4, 8, 16), *, ranks: int = 2,
          fabric: str | Fabric = "auto", micro_steps: int = 1, repeats: int = 7, ddp: Sequence[float | str] = (),
          micro_step: Callable[[nn.Module], Any] | None = None, timeout_s: float = 300.0) -> Sweep:
    """Measure every bucket size in `caps_mb`, the best plan, and the baselines, in one run.

    `model()` builds the module on every rank; `micro_step(module)` runs one forward and returns the loss
    (default: a small tensor through an emulated model). `ddp` names caps, or `"default"`, to run with stock
    DDP as well. Without any cap only the plan and the baselines are measured. Raises `ValueError` on a cap that is
    not positive.
    """
    check_caps([*caps_mb, *(cap for cap in ddp if cap != "default")])
    refuse(repeats, micro_steps)
    rows = run(_sweep_on_rank, model, tuple(caps_mb), micro_steps, repeats, tuple(ddp), micro_step or tiny_micro_step,
               ranks=ranks, fabric=fabric, timeout_s=timeout_s)
    profile, link, plan, _ = rows[0]
    return Sweep(profile, link, plan, tuple(caps_mb), merged([row[3] for row in rows]))


def compare(model: Callable[[], nn.Module], variants: Mapping[str, tuple[str, Mapping[str, Any]]], *, ranks: int = 2,
            fabric: str | Fabric = "auto", micro_steps: int = 1, repeats: int = 7,
            micro_step: Callable[[nn.Module], Any] | None = None, every: Collection[str] = (),
            timeout_s: float = 300.0) -> dict[str, Measured]:
    """Measure strategies in alternation: `variants` maps a name to a strategy of `train.STRATEGIES` and its options.
    Those named in `every` synchronise after every micro-step, the others once.

    >>> compare(load.model, {"once": ("no_sync", {}), "4 MB": ("bucketed", {"bucket_mb": 4})})  # doctest: +SKIP
    """
    refuse(repeats, micro_steps)
    rows = run(_compare_on_rank, model, dict(variants), micro_steps, repeats, micro_step or tiny_micro_step,
               frozenset(every), ranks=ranks, fabric=fabric, timeout_s=timeout_s)
    return merged(rows)


def refuse(repeats: int, micro_steps: int) -> None:
    """Raises `ValueError` on numbers that no measurement can be made with."""
    if repeats < 2 or micro_steps < 1:
        raise ValueError(f"repeats={repeats}, micro_steps={micro_steps}: at least 2 repeats give a spread, and an "
                         "update has at least one micro-step")


def check_caps(caps_mb: Sequence[float | str]) -> None:
    """Raises `ValueError` on a bucket size that is not a number above 0."""
    for cap in caps_mb:
        if isinstance(cap, str) or not 0 < cap < float("inf"):
            raise ValueError(f"bucket size {cap!r} MB: give sizes above 0")


def message_sizes(whole: int) -> list[int]:
    """Sizes in bytes to fit the wire with, for a gradient of `whole` bytes: two at least, none above it but for the
    least of gradients."""
    return sorted({min(s, whole) for s in (MB // 4, MB, 2 * MB, 4 * MB, 8 * MB)} | {max(4, whole // 4), max(8, whole)})


def merged(rows: list[tuple[dict[str, list[float]], dict[str, Timeline]]]) -> dict[str, Measured]:
    """What `alternate` returned on every rank, rank 0 first, as one `Measured` a variant."""
    seconds = rows[0][0]
    return {name: Measured(name, tuple(seconds[name]), Timeline.merge(lines[name] for _, lines in rows))
            for name in seconds}


def tiny_micro_step(module: nn.Module) -> Any:
    """One forward of an emulated model."""
    import torch
    return module(torch.ones(4)).square().mean()


def _compare_on_rank(model, variants, micro_steps, repeats, micro_step, every):
    from course_lib.tune.alternate import alternate
    from course_lib.tune.update import Updates
    updates = Updates(model, micro_step, micro_steps)
    return alternate({name: updates.of(*variant, name in every) for name, variant in variants.items()}, repeats,
                     provenance=updates.provenance)


def _sweep_on_rank(model, caps_mb, micro_steps, repeats, ddp, micro_step):
    """The rank's side of `sweep`: profile, fit and plan, then everything in alternation, then the costs of it."""
    import torch.distributed as dist

    from course_lib.launch import control_group
    from course_lib.launch.measure import fit, measure
    from course_lib.tune.alternate import alternate
    from course_lib.tune.update import Updates

    updates = Updates(model, micro_step, micro_steps)
    compute = updates.compute()
    for _ in range(3):
        compute.prepare()
        dist.barrier(control_group())
        compute.run()
    profile = updates.observer.profile(micro_steps)
    whole = profile.total_bytes
    sizes = message_sizes(whole)
    chosen = [best_plan(profile, measure(sizes=sizes, repeats=2))]
    dist.broadcast_object_list(chosen, 0)
    steps = {"compute": compute, "comm": updates.communication(whole),
             "serial": updates.of("no_sync", {})}
    for cap in caps_mb:
        steps[label(cap)] = updates.of("bucketed", {"bucket_mb": cap, "first_bucket_mb": None})
    steps["plan"] = updates.of("bucketed", {"plan": chosen[0].buckets})
    for cap in ddp:
        options = {} if cap == "default" else {"bucket_mb": cap, "first_bucket_mb": None}
        steps[f"ddp {cap if cap == 'default' else label(cap)}"] = updates.of("ddp", options)
    # The first profile and fit only made the plan. What it is judged by comes from the same rounds as the runs, so
    # that a moment in which the machine was busy cannot spoil one and spare the other.
    trains = {f"train {s}": (s, max(2, min(6, whole // s))) for s in sizes if s < whole or whole <= MB}
    steps |= {name: updates.train(*train) for name, train in trains.items()}
    seconds, timelines = alternate(steps, repeats, provenance=updates.provenance)
    times = [statistics.median(seconds.pop(name)) / length for name, (_, length) in trains.items()]
    for name in trains:
        del timelines[name]
    link = LinkCost(*fit([size for size, _ in trains.values()], times))
    return updates.observer.profile(micro_steps, skip=3 * micro_steps), link, chosen[0], (seconds, timelines)
