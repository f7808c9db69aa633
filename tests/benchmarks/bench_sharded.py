"""ZeRO stage 3 against FSDP2 with the same collectives and the same prefetch: step, bytes and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from course_lib.launch import run
from course_lib.spread import half_iqr
from tests.benchmarks.bench_overlap import fabric
from tests.benchmarks.harness import Figure, benchmark, median_interval

LAYERS, MB_EACH, PAIRS = 8, 2.0, 20
STOCK, RINGS = "fsdp2", "fsdp2 on our rings"


@benchmark
def sharded_against_fsdp2() -> Iterator[Figure]:
    """One micro-step of an emulated device on two ranks; every layer a unit, one gathered ahead."""
    seconds, sent, kernel, peak = run(_measure, ranks=2, fabric=fabric(), timeout_s=300)[0]
    ratios = [a / b for a, b in zip(seconds["ours"], seconds[RINGS])]
    stock = statistics.median(a / b for a, b in zip(seconds["ours"], seconds[STOCK]))
    low, high = median_interval(ratios)
    yield Figure("ZeRO-3 / FSDP2 on our rings, step time", statistics.median(ratios), "ratio", half_iqr(ratios), 1.02,
                 "<=", note=f"{len(ratios)} pairs, 95 % interval of the median {low:.4f} to {high:.4f}; on a CPU "
                 f"FSDP2 waits for each reduce-scatter. Stock FSDP2 on gloo: ratio {stock:.3f}")
    half = LAYERS * MB_EACH * 2**20 / 2
    wanted = (3 - 1 / LAYERS) * half
    yield Figure("ZeRO-3 bytes sent / (n−1)/n·(3 − 1/units)·S", sent["ours"] / wanted, "ratio", 0, 1.05, "<=",
                 note="handed to the wire: " + _mb(sent) + " (stock FSDP2's by the formula of a ring); " + (
                     "counted by the kernel: " + _mb(kernel) if kernel else "no kernel counters on this wire"))
    yield Figure("ZeRO-3 / FSDP2 on our rings, peak of live tensor bytes", peak["ours"] / peak[RINGS], "ratio", 0, 1.0,
                 "<=", note=_mb(peak))


def _mb(found: dict[str, float]) -> str:
    return ", ".join(f"{kind} {value / 2**20:.1f} MB" for kind, value in found.items())


def _kernel_sent() -> int | None:
    """Bytes that this rank's wire has sent, when nothing is on its way any more; None without counters."""
    import torch.distributed as dist

    from course_lib.launch import context, control_group
    from course_lib.launch.netns import kernel_bytes

    if context().fabric.kind != "shaped":
        return None
    dist.barrier(control_group())
    time.sleep(0.05)
    return kernel_bytes()[1]


def _measure() -> tuple[dict, dict, dict, dict]:
    import torch
    import torch.distributed as dist

    from course_lib.train import Sharded, emulated
    from course_lib.train.fsdp2 import fsdp2
    from course_lib.train.live_bytes import peak_bytes
    from course_lib.tune.alternate import Step, alternate

    def step_of(model) -> Step:
        finish = getattr(model, "finish_gradient_synchronization", lambda: None)

        def step() -> None:
            model(torch.ones(4)).square().mean().backward()
            finish()

        return Step(step, model.zero_grad)

    def layers() -> torch.nn.Sequential:
        return emulated.equal(LAYERS, MB_EACH, forward_ms=12, backward_ms=24)

    torch.set_num_threads(1)
    steps = {"ours": step_of(Sharded(layers(), stage=3)), RINGS: step_of(fsdp2(layers(), our_collectives=True)),
             STOCK: step_of(fsdp2(layers()))}
    seconds, _ = alternate(steps, PAIRS, warmup=3)
    sent, kernel, peak, traffic = {}, {}, {}, dist.group.WORLD.traffic
    for kind, step in steps.items():
        step.prepare()
        traffic.reset()
        before = _kernel_sent()
        step.run()
        sent[kind] = traffic.total_bytes
        if before is not None:
            kernel[kind] = _kernel_sent() - before
        step.prepare()
        peak[kind] = peak_bytes(step.run, warmup=0)
    return seconds, sent, kernel, peak
