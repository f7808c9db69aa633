"""What compression costs a CPU, against PyTorch's hooks where it has them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from course_lib.launch import run
from course_lib.spread import half_iqr
from tests.benchmarks.harness import Figure, benchmark

_ROUNDS = 15
_GOALS_MS_PER_MB = {"onebit": 2.5, "topk": 6.0}


@benchmark
def compression_cost() -> Iterator[Figure]:
    """CPU time of one hook call on one thread, a bucket of 16 MB, in alternation with torch's. One rank, so that
    sending is not in it; a rank alone does all of 1-bit's second phase, which is otherwise shared out."""
    (times,) = run(_times, ranks=1, fabric="loopback", timeout_s=300)
    for scheme in ("fp16", "bf16", "powersgd"):
        ratios = [ours / theirs for ours, theirs in zip(times[scheme], times[f"torch {scheme}"])]
        yield Figure(f"{scheme} over torch's hook", statistics.median(ratios), "of its CPU time", half_iqr(ratios), 1.0,
                     "<=", note=f"{statistics.median(times[scheme]):.2f} ms/MB, {_ROUNDS} pairs")
    for scheme, goal in _GOALS_MS_PER_MB.items():
        yield Figure(f"{scheme} on one thread", statistics.median(times[scheme]), "ms/MB", half_iqr(times[scheme]),
                     goal, "<=", note=f"{_ROUNDS} calls")


def _times() -> dict[str, list[float]]:
    """CPU ms per MB of every hook. Plain gloo, because torch's PowerSGD waits for a collective in a callback."""
    import time

    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    from course_lib.compress import BF16, FP16, OneBit, PowerSGD, TopK, hook
    from course_lib.train.bucket import Bucket
    torch.set_num_threads(1)
    group = dist.new_group(backend="gloo")
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)])
    bucket = Bucket(0, list(model.parameters()), last=True)
    gradient, mb = torch.randn(bucket.flat.numel()), bucket.bytes / 2**20
    theirs = PowerSGDState(group, matrix_approximation_rank=4, start_powerSGD_iter=2)
    theirs.iter = 2
    calls: dict[str, tuple[Callable, object]] = {
        "fp16": (hook, FP16(model, process_group=group)), "torch fp16": (default_hooks.fp16_compress_hook, group),
        "bf16": (hook, BF16(model, process_group=group)), "torch bf16": (default_hooks.bf16_compress_hook, group),
        "powersgd": (hook, PowerSGD(model, rank=4, process_group=group)), "torch powersgd": (powerSGD_hook, theirs),
        "onebit": (hook, OneBit(model, process_group=group)),
        "topk": (hook, TopK(model, k=0.01, process_group=group))}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(_ROUNDS + 1):
        for name, (call, state) in list(calls.items())[::1 - 2 * (i % 2)]:  # there and back: who is first differs
            bucket.flat.copy_(gradient)
            start = time.process_time()
            call(state, bucket).wait()
            times[name].append(1e3 * (time.process_time() - start) / mb)
    return {name: values[1:] for name, values in times.items()}
