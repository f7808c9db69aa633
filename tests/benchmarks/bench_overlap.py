"""Our reducer against stock DDP, the planned buckets against the bound, predictions against runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from course_lib.launch import Fabric, run
from course_lib.launch.fabric import shaped_works
from course_lib.spread import half_iqr
from course_lib.tune import Sweep, calibrate, sweep
from tests.benchmarks.harness import Figure, benchmark, median_interval

CAPS = (1, 2, 3, 4, 8, 16)


def fabric(latency_us: float = 4000) -> Fabric:
    return Fabric(gbit=1.0, latency_us=latency_us, kind="shaped" if shaped_works() else "paced")


@benchmark
def bucketed_against_ddp() -> Iterator[Figure]:
    """Step time of `Bucketed` over stock DDP with the same cap, pair by pair, on the same ranks and wire."""
    load = calibrate(0.65, fabric())
    for name, rows in (("emulated device", run(_pairs_emulated, load, ranks=2, fabric=fabric(), timeout_s=300)),
                       ("real CPU compute", run(_pairs_cpu, ranks=2, fabric=fabric(1000), timeout_s=300))):
        ratios = rows[0]
        low, high = median_interval(ratios)
        goal, top = (1.00, 1.01) if name == "emulated device" else (1.03, 1.05)
        yield Figure(f"Bucketed / DDP step time, {name}", statistics.median(ratios), "ratio", half_iqr(ratios), goal,
                     "<=", note=f"{len(ratios)} pairs, 95 % interval of the median {low:.4f} to {high:.4f}")
        yield Figure(f"Bucketed / DDP, {name}, upper end of the 95 % interval", high, "ratio", (high - low) / 2, top,
                     "<=")


def _pairs_emulated(load) -> list[float]:
    from course_lib.tune.sweep import tiny_micro_step
    return _pairs(load.model, tiny_micro_step, cap_mb=4, pairs=20)


def _pairs_cpu() -> list[float]:
    import torch

    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU())
                                     for _ in range(12)])

    x = torch.randn(1024, 512)
    return _pairs(model, lambda m: m(x).square().mean(), cap_mb=4, pairs=20)


def _pairs(model, micro_step, cap_mb: float, pairs: int, steps: int = 4) -> list[float]:
    """Each of a pair is `steps` steps in a row, gradients zeroed before each."""
    from course_lib.tune.alternate import Step, alternate
    from course_lib.tune.update import Updates
    updates = Updates(model, micro_step, 1)
    options = {"bucket_mb": cap_mb, "first_bucket_mb": None}

    def several(strategy: str) -> Step:
        one = updates.of(strategy, options)

        def run_all() -> None:
            for _ in range(steps):
                one.prepare()
                one.run()

        return Step(run_all)

    seconds, _ = alternate({"ours": several("bucketed"), "ddp": several("ddp")}, repeats=pairs, warmup=2)
    return [a / b for a, b in zip(seconds["ours"], seconds["ddp"])]


def _sweeps(profile: str, r: float, runs: int, **options) -> list[Sweep]:
    return [sweep(calibrate(r, fabric(), profile=profile).model, fabric=fabric(), timeout_s=500, **options)
            for _ in range(runs)]


@benchmark
def attained_by_the_plan() -> Iterator[Figure]:
    """A of the planned buckets: five fresh runs at each r, equal layers and a GPT-like size profile."""
    for profile in ("equal", "gpt"):
        for r in (0.3, 0.65, 1.0):
            found = _sweeps(profile, r, 5, caps_mb=(), repeats=11)
            values = [s.attained().value for s in found]
            floors = [s.floor_s / s.measured["plan"].median_s for s in found]
            note = (f"runs {', '.join(f'{v:.3f}' for v in values)}; r measured "
                    f"{', '.join(f'{s.r:.2f}' for s in found)}; T_floor/T {statistics.median(floors):.3f}")
            name = f"attained A of the plan, {profile}, r = {r}"
            yield Figure(f"{name}, lowest run", min(values), "A", half_iqr(values), 0.95, ">=", note=note)
            yield Figure(f"{name}, highest run", max(values), "A", half_iqr(values), 1.03, "<=")


@benchmark
def plan_against_uniform() -> Iterator[Figure]:
    """GPT-like profile at r = 1: F of the plan less F of the best uniform cap, and of DDP's own layout."""
    found = _sweeps("gpt", 1.0, 3, caps_mb=CAPS, repeats=7, ddp=("default", 4, 8))
    caps = [f"{c} MB" for c in CAPS]
    uniform, stock = [], []
    for s in found:
        plan = s.fair_score("plan").value
        uniform.append(plan - max(s.fair_score(c).value for c in caps))
        stock.append(plan - max(s.fair_score(n).value for n in s.measured if n.startswith("ddp")))
    shown = "; ".join(f"plan {s.fair_score('plan').value:.3f}" for s in found)
    yield Figure("F of the plan − F of the best uniform cap, gpt, r = 1", statistics.median(uniform), "F",
                 half_iqr(uniform), 0.05, ">=", note=shown)
    yield Figure("F of the plan − F of the best DDP layout, gpt, r = 1", statistics.median(stock), "F",
                 half_iqr(stock), 0.05, ">=")


@benchmark
def prediction() -> Iterator[Figure]:
    """Predicted against measured step and exposed time, at every cap and for the plan."""
    for r in (0.65, 1.0):
        found = _sweeps("equal", r, 1, caps_mb=CAPS, repeats=9)[0]
        yield from _errors(found, f"emulated, r = {r}", 0.03, 0.08)
    yield from _errors(sweep(cpu_model, caps_mb=(1, 2, 4, 12), fabric=fabric(1000), repeats=9,
                             micro_step=cpu_micro_step), "real CPU compute", 0.15, 0.25)


def cpu_model():
    import torch
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(12)])


def cpu_micro_step(module):
    import torch
    return module(torch.ones(1024, 512)).square().mean()


def _errors(found: Sweep, name: str, step_goal: float, exposed_goal: float) -> Iterator[Figure]:
    steps, exposed = [], []
    for cap in found.caps_mb:
        predicted, measured = found.prediction(cap), found.measured[f"{cap:g} MB"]
        steps.append(abs(predicted.step_s / measured.median_s - 1))
        exposed.append(abs(predicted.exposed_s - measured.exposed_s) / found.Tm)
    note = f"r measured {found.r:.2f}, errors {', '.join(f'{e:.3f}' for e in steps)}"
    yield Figure(f"largest error of the predicted step, {name}", max(steps), "of the step", half_iqr(steps), step_goal,
                 "<=", note=note)
    yield Figure(f"largest error of the predicted exposed time, {name}", max(exposed), "of Tm", half_iqr(exposed),
                 exposed_goal, "<=")
