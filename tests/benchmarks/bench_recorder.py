"""What recording costs, and whether the recorder and torch.profiler tell the same story."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from course_lib import overlap
from course_lib.launch import Fabric, run
from course_lib.launch.fabric import shaped_works
from course_lib.spread import half_iqr
from course_lib.timeline import Timeline
from tests.benchmarks.harness import Figure, benchmark, median_interval

WIRE = Fabric(gbit=1.0, latency_us=2000, kind="shaped" if shaped_works() else "paced")


@benchmark
def recorder_cost() -> Iterator[Figure]:
    """Recorded over unrecorded step of real CPU compute, one rank, pairs in alternation."""
    ratios = run(_recorded_pairs, ranks=1, fabric="loopback")[0]
    low, high = median_interval(ratios)
    yield Figure("cost of the recorder", statistics.median(ratios) - 1, "of a step", half_iqr(ratios), 0.01, "<=",
                 note=f"{len(ratios)} pairs, 95 % interval of the median {low - 1:.4f} to {high - 1:.4f}")


def _recorded_pairs() -> list[float]:
    import contextlib

    import torch

    from course_lib.record import now, recording
    from course_lib.train.bucketed import Bucketed
    from course_lib.train.phases import Phases
    torch.set_num_threads(1)  # a second thread would wait for whatever else this machine does
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(24)])
    wrapped, x = Bucketed(model, bucket_mb=1), torch.randn(256, 256)
    phases = Phases(model)

    def step(recorded: bool) -> int:
        wrapped.zero_grad(set_to_none=False)
        with recording() if recorded else contextlib.nullcontext():
            start = now()
            phases.micro_step(lambda: wrapped(x).square().mean())
            wrapped.finish_gradient_synchronization()
            return now() - start

    for _ in range(10):
        step(True), step(False)
    ratios = []
    for k in range(200):
        first = step(k % 2 == 0)
        second = step(k % 2 == 1)
        ratios.append(first / second if k % 2 == 0 else second / first)
    return ratios


@benchmark
def recorder_against_profiler() -> Iterator[Figure]:
    """Compute, communication and exposed time of the same steps by both, as a share of the step."""
    for kind in ("emulated", "cpu"):
        rows = run(_both, kind, ranks=2, fabric=WIRE)
        ours, theirs = (overlap.report(Timeline.merge(r[k] for r in rows)).pooled for k in (1, 0))
        gaps = [abs(getattr(ours, field) - getattr(theirs, field)) / ours.span
                for field in ("span", "compute", "comm", "exposed", "hidden")]
        yield Figure(f"recorder against profiler, {kind}", max(gaps), "of the step", half_iqr(gaps), 0.02, "<=")


def _both(kind: str) -> tuple[Timeline, Timeline]:
    import torch
    import torch.distributed as dist

    from course_lib.record import recording
    from course_lib.train import emulated
    from course_lib.train.bucketed import Bucketed
    from course_lib.train.phases import Phases
    from course_lib.train.profiled import profiled, profiled_step
    torch.manual_seed(0)
    if kind == "emulated":
        model, x = emulated.equal(16, 1, 3, 6), torch.ones(4)
    else:
        model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(768, 768), torch.nn.GELU())
                                      for _ in range(8)])
        x = torch.randn(1024, 768)
    wrapped, phases = Bucketed(model, bucket_mb=4, first_bucket_mb=None), Phases(model)

    def step() -> None:
        wrapped.zero_grad(set_to_none=False)
        if kind == "emulated":
            wrapped(x).square().mean().backward()
        else:
            phases.micro_step(lambda: wrapped(x).square().mean())
        wrapped.finish_gradient_synchronization()

    for _ in range(3):
        step()
    with profiled() as capture, recording(dist.get_rank()) as rec:
        for i in range(6):
            with profiled_step(i), rec.measure_step(i):
                step()
    return capture.timeline(), rec.timeline()
