"""The learner's compressors on real ranks and a real wire, beside those of the library: step, bytes, gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from course_lib.lab.errors import LabError
from course_lib.lab.workbench.race import FLOAT32, SCHEMES
from course_lib.launch import Fabric
from course_lib.timeline import Timeline
from course_lib.tune.calibrate import Load
from course_lib.tune.sweep import Measured

TWINS = {"Half": "fp16", "TopK": "top 1 %"}
"""The learner's classes that exchange exactly what a scheme of the library does (a `TopK` of 1 %). The library's 1-bit
has a second phase."""


@dataclass(frozen=True)
class Compressed(Measured):
    """An update with one scheme. `bytes` is what a rank sends by the Wire's count, `kernel_bytes` what the kernel saw
    of it, headers included (None where no kernel counts). `from_library` is the largest difference of a gradient
    element from the library's same scheme, as a fraction of the largest element (None where there is none); gradients
    are compared that have no two entries of one magnitude."""

    bytes: float
    kernel_bytes: float | None
    from_library: float | None


def compressed_runs(load: Load, own: Mapping[str, Callable[[], Any]] | None = None, *, ranks: int = 2,
                    fabric: str | Fabric = "auto", repeats: int = 3, bucket_mb: float = 1.0,
                    timeout_s: float = 120.0) -> dict[str, Compressed]:
    """Time updates with every scheme of `race.SCHEMES`, and with the learner's, in alternation on the same ranks.

    `own` maps a name to what makes a `Half`, a `OneBit` or a `TopK` (`lambda: TopK(0.01)`). All travel in buckets of
    `bucket_mb` MB under backward. Raises `OwnRunFailed` with one sentence for what the learner's classes do wrong.
    """
    from course_lib.lab.workbench.buckets import _run

    if own and (clash := set(own) & set(SCHEMES)):
        raise LabError(f"compressed_runs: {clash.pop()!r} is the library's name; give yours another.")
    rows = _run(_on_rank, load, dict(own or {}), bucket_mb, repeats, ranks=ranks, fabric=fabric, timeout_s=timeout_s)
    facts, seconds, _ = rows[0]
    return {name: Compressed(name, tuple(seconds[name]), Timeline.merge(row[2][name] for row in rows), *facts[name])
            for name in seconds}  # fmt: skip


def host_costs(numel: int = 2**20, repeats: int = 7) -> dict[str, float]:
    """Seconds of one host for a byte of float32 gradient, compressing and decompressing, by the name of the scheme."""
    from course_lib.launch import run
    return run(_costs_on_rank, numel, repeats, ranks=1, fabric="loopback", timeout_s=60)[0]


def as_matrices(model: Any) -> Any:
    """The emulated `model` with each parameter as a matrix, nearly square where its size allows."""
    from torch import nn

    for layer in model:
        layer.weights = nn.ParameterList([nn.Parameter(p.detach().view(_rows(p.numel()), -1)) for p in layer.weights])
    return model


def _rows(numel: int) -> int:
    return next(rows for rows in range(int(numel**0.5), 0, -1) if numel % rows == 0)


def _on_rank(load, own, bucket_mb, repeats):
    """The rank's side: two updates of each are counted and compared, then all are timed."""
    from course_lib.compress import hook
    from course_lib.lab.workbench import gradients
    from course_lib.lab.workbench.own_hook import OwnHook
    from course_lib.launch import context, current_wire
    from course_lib.train import emulated, wrap
    from course_lib.tune.alternate import Step, alternate

    steps, facts, found = {}, {}, {}
    layout = {"bucket_mb": bucket_mb, "first_bucket_mb": None}
    for name, scheme in [*SCHEMES.items(), *((name, make) for name, make in own.items())]:
        model = as_matrices(load.model())
        state = OwnHook(model, scheme) if name in own else _known(model, *scheme)
        wrapped = wrap("bucketed", model, **layout, **({"comm_hook": hook, "hook_state": state} if state else {}))
        steps[name] = Step(_update(wrapped, state), lambda model=model: model.zero_grad(set_to_none=False))
        counted = state.wire_bytes if state and name not in own else lambda: current_wire().traffic.total_bytes
        with gradients.instant(model), gradients.without_ties(model):
            for _ in range(2):
                steps[name].prepare()
                before, kernel = counted(), _kernel()
                steps[name].run()
            seen = _kernel()
        found[name] = gradients.flat_gradient(model)
        twin = found.get(TWINS.get(type(state.first).__name__, "")) if name in own else None
        facts[name] = (counted() - before, None if seen is None else seen - kernel,
                       None if twin is None else gradients.difference(found[name], twin))
    provenance = f"{emulated.PROVENANCE}, {context().spec.provenance}"
    return facts, *alternate(steps, repeats, 1, provenance)


def _known(model, scheme, options):
    from course_lib.compress import SCHEMES as KNOWN
    return KNOWN[scheme](model, **options) if scheme else None


def _update(wrapped, state):
    import torch.distributed as dist

    from course_lib.lab.workbench.gradients import loss_of
    from course_lib.lab.workbench.own_hook import OwnHook

    def update():
        loss_of(wrapped, dist.get_rank(), 0, 1).backward()
        wrapped.finish_gradient_synchronization()
        if isinstance(state, OwnHook):
            state.check()

    return update


def _kernel():
    """Bytes this rank's interface has sent, when nothing is on its way any more; None without counters."""
    import time

    import torch.distributed as dist

    from course_lib.launch import context, control_group
    from course_lib.launch.netns import kernel_bytes

    if context().fabric.kind != "shaped":
        return None
    dist.barrier(control_group())
    time.sleep(0.05)
    return kernel_bytes()[1]


def _costs_on_rank(numel, repeats):
    import statistics

    import torch

    from course_lib.compress import hook
    from course_lib.record import now
    from course_lib.train.bucket import Bucket

    torch.set_num_threads(1)
    model = torch.nn.Linear(1024, numel // 1024, bias=False)
    bucket, gradient = Bucket(0, list(model.parameters()), last=True), torch.randn(numel)
    states = {name: _known(model, *scheme) for name, scheme in SCHEMES.items() if scheme[0]}
    times: dict[str, list[float]] = {name: [] for name in states}
    for _ in range(repeats + 1):
        for name, state in states.items():
            bucket.flat.copy_(gradient)
            begin = now()
            hook(state, bucket).wait()
            times[name].append((now() - begin) * 1e-9 / bucket.bytes)
    return {FLOAT32: 0.0, **{name: statistics.median(values[1:]) for name, values in times.items()}}


def accuracies(cases: Mapping[str, Mapping[str, Any]], **size: Any) -> dict[str, float]:
    """Percent right of `compress.convergence.accuracy` for every case (its keywords), two at a time. `size` is for
    all: `workers`, `steps`, `seed`."""
    from course_lib.launch import run
    found = run(_accuracies_on_rank, dict(cases), size, ranks=2, fabric="loopback", timeout_s=200)
    return {name: (found[0] | found[1])[name] for name in cases}


def _accuracies_on_rank(cases, size):
    import torch
    import torch.distributed as dist

    from course_lib.compress.convergence import accuracy

    torch.set_num_threads(1)
    return {name: accuracy(**options, **size) for i, (name, options) in enumerate(cases.items())
            if i % dist.get_world_size() == dist.get_rank()}


def top_k_bytes(shares: Sequence[float], ranks: int, numel: int = 2**16) -> list[float]:
    """Bytes that one rank sends for top-k of each share, as a multiple of what a float32 ring sends for all entries."""
    from course_lib.launch import run
    return run(_top_k_bytes_on_rank, tuple(shares), numel, ranks=ranks, fabric="loopback", timeout_s=60)[0]


def _top_k_bytes_on_rank(shares, numel):
    import torch

    from course_lib.compress import TopK, hook
    from course_lib.launch import current_wire
    from course_lib.train.bucket import Bucket

    parameter, wire = torch.nn.Linear(numel, 1, bias=False), current_wire()

    def sent(share):
        bucket, before = Bucket(0, list(parameter.parameters()), last=True), wire.traffic.total_bytes
        bucket.flat.copy_(torch.randn(numel))
        if share is None:
            torch.distributed.all_reduce(bucket.flat)
        else:
            hook(TopK(parameter, share), bucket).wait()
        return wire.traffic.total_bytes - before

    whole = sent(None)
    return [sent(share) / whole for share in shares]
