"""Choose a bucket layout: profile once, predict every layout, measure only the few that could be best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.launch import Fabric, run
from course_lib.link_cost import LinkCost
from course_lib.simulate.buckets import MB, GradientProfile, Prediction, best_plan, predict, uniform_plan
from course_lib.tune.choice import DEFAULT, PLAN, Choice, cap_mb
from course_lib.tune.sweep import check_caps, label, merged, message_sizes, refuse

if TYPE_CHECKING:
    from torch import nn

CAPS_MB = (1, 2, 4, 8, 16, 25, 50, 100)
PROFILED = 5
"""Updates that are profiled, after one that is not."""


def choose(model: Callable[[], Any], micro_step: Callable[[nn.Module], Any] | None = None, *, ranks: int = 2,
           fabric: str | Fabric = "auto", micro_steps: int = 1, caps_mb: Sequence[float] = CAPS_MB,
           candidates: int = 4, repeats: int = 9, timeout_s: float = 600.0) -> Choice:
    """Predict the step of DDP's default, every cap in `caps_mb` and the best contiguous plan from one profiling run
    without communication and the fitted wire; measure at most `candidates` of them and the baselines, in alternation.

    `model()` is called once on every rank and returns what `tune.factory` describes; where `micro_step` is given, a
    module. Each variant gets a copy of the module. Candidates are stock DDP: its default, the plan (torch 2.13 or
    later can do it), then the caps that are predicted best, a layout that is there already left out.

    Raises `ValueError` for arguments that cannot be, `RankFailed` whose cause is a `ModelError` for a model that
    cannot be tuned, and as `launch.run` does.
    """
    check_caps(caps_mb)
    refuse(repeats, micro_steps)
    if not caps_mb:
        raise ValueError("no bucket size to try: give at least one, in MB")
    if candidates < 2:
        raise ValueError(f"candidates={candidates}: measure at least 2, DDP's default and one to compare it with")
    rows = run(choose_on_rank, model, micro_step, micro_steps, sorted(set(caps_mb)), candidates, repeats,
               ranks=ranks, fabric=fabric, timeout_s=timeout_s)
    profile, link, predicted, _ = rows[0]
    return Choice(profile, link, predicted, merged([row[3] for row in rows]))


def predictions(profile: GradientProfile, link: LinkCost, caps_mb: Sequence[float]) -> dict[str, Prediction]:
    """What one profile and one fit say about every layout that could be chosen."""
    plans = {label(cap): uniform_plan(profile, cap * MB) for cap in caps_mb}
    plans |= {PLAN: best_plan(profile, link), DEFAULT: uniform_plan(profile, 25 * MB, 1 * MB)}
    return {name: predict(profile, link, plan) for name, plan in plans.items()}


def shortlist(predicted: dict[str, Prediction], candidates: int, with_plan: bool = True) -> list[str]:
    """Names of the layouts worth measuring: the default, the plan, then caps by predicted step (fewer buckets first
    where that ties). No layout is listed twice, and the name that is simpler to set stands for it."""
    caps = sorted((n for n in predicted if n not in (DEFAULT, PLAN)),
                  key=lambda n: (predicted[n].step_s, len(predicted[n].plan)))
    same_as_plan = [n for n in caps if predicted[n].plan.bytes == predicted[PLAN].plan.bytes]
    ahead = same_as_plan[:1] or ([PLAN] if with_plan else [])
    chosen: list[str] = []
    for name in (DEFAULT, *ahead, *caps):
        if all(predicted[name].plan.bytes != predicted[n].plan.bytes for n in chosen):
            chosen.append(name)
    return chosen[:candidates]


def layouts(predicted: dict[str, Prediction]) -> dict[str, dict[str, Any]]:
    """Options of `train.StockDDP` for every layout that was predicted."""
    found = {name: {"bucket_mb": cap_mb(name), "first_bucket_mb": None} for name in predicted
             if name not in (DEFAULT, PLAN)}
    return found | {DEFAULT: {}, PLAN: {"bucket_caps_mb": [b / MB for b in predicted[PLAN].plan.bytes]}}


def choose_on_rank(model, micro_step, micro_steps, caps_mb, candidates, repeats):
    """The rank's side of `choose`. Profile and fit are the same on all ranks, so all make the same choice."""
    import torch.distributed as dist

    from course_lib.launch import control_group
    from course_lib.launch.measure import measure
    from course_lib.train.ddp import takes_caps
    from course_lib.tune.alternate import alternate
    from course_lib.tune.factory import copy_of, workload
    from course_lib.tune.update import Updates

    module, step = workload(model(), micro_step)
    updates = Updates(lambda: copy_of(module), step, micro_steps)
    compute = updates.compute()
    for _ in range(1 + PROFILED):
        compute.prepare()
        dist.barrier(control_group())
        compute.run()
    profile = updates.observer.profile(micro_steps, skip=micro_steps)
    link = measure(sizes=message_sizes(profile.total_bytes))
    predicted = predictions(profile, link, caps_mb)
    options = layouts(predicted)
    steps = {"compute": compute, "comm": updates.communication(profile.total_bytes),
             "serial": updates.of("no_sync", {})}
    steps |= {name: updates.of("ddp", options[name]) for name in shortlist(predicted, candidates, takes_caps())}
    return profile, link, predicted, alternate(steps, repeats, provenance=updates.provenance)
