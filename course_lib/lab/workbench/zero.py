"""Whole updates of ZeRO in alternation on real ranks: the learner's stage 3, the library's stages, DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from course_lib.launch import Fabric
from course_lib.link_cost import LinkCost
from course_lib.simulate.zero import Units
from course_lib.timeline import Timeline
from course_lib.tune.sweep import MB, Measured

LR = 1e-3
SIZES = (MB // 2, 2 * MB)
"""Bytes of the rings that are fitted: smaller segments would pass within the burst that a shaped wire allows."""
STAGES = ((1, 1), (2, 1), (3, 0), (3, 1), (3, 2))
"""Stage, and units gathered ahead."""


class Costs(NamedTuple):
    """What an all-gather and a reduce-scatter of S bytes cost, as rings, on this wire."""

    gather: LinkCost
    reduce: LinkCost

    def units(self, count: int, mb: float, forward: float) -> Units:
        """Equal units whose forward takes `forward` times as long as the gather of one, and whose backward twice that;
        a millisecond at least, where one rank sends nothing."""
        Tf = max(1e-3, forward * self.gather.cost(mb * MB))
        return Units(count, mb * MB, Tf, 2 * Tf)


@dataclass(frozen=True)
class Zeroed(Measured):
    """A way of updating. `sent` are the bytes that rank 0 sends in one update; of stock collectives what a ring would
    send. `from_ddp` is the largest difference of a parameter element, on any rank, from DDP's after as many updates,
    as a fraction of the largest element."""

    sent: float
    from_ddp: float


class ZeroRuns(NamedTuple):
    """`fed` are units with enough compute to hide their communication, `starved` have too little. `runs` has DDP, the
    library's stages, `"yours"`, `"one unit"` (stage 3 without units), `"FSDP2"`, all of `fed` units, and
    `"starved, 0 ahead"` and so on."""

    costs: Costs
    fed: Units
    starved: Units
    runs: dict[str, Zeroed]


def zero_runs(ScatterBuckets: type, run_pass: Callable, N: int = 2, *, count: int = 4, mb: float = 1.0,
              forward: tuple[float, float] = (1.3, 0.4), ahead: int = 1, ranks: int = 2,
              fabric: str | Fabric = "auto", repeats: int = 3, timeout_s: float = 150.0) -> ZeroRuns:
    """Fit what rings cost on this wire, size an emulated model of `count` units of `mb` MB, and time updates of N
    micro-steps and a step of AdamW, in alternation on the same ranks.

    `forward` is what one unit computes in forward, as a multiple of its gather, in `fed` and in `starved` units. The
    learner's stage 3 gathers `ahead` units ahead. Raises `OwnRunFailed` with one sentence for whatever a piece does
    wrong on a rank, a hang included.
    """
    from course_lib.lab.workbench.buckets import _run

    rows = _run(_on_rank, (ScatterBuckets, run_pass, ahead), N, count, mb, forward, repeats, ranks=ranks,
                fabric=fabric, timeout_s=timeout_s)
    costs, sent, worst, seconds, _ = rows[0]
    fed, starved = (costs.units(count, mb, each) for each in forward)
    return ZeroRuns(costs, fed, starved, {
        name: Zeroed(name, tuple(seconds[name]), Timeline.merge(row[4][name] for row in rows), sent[name], worst[name])
        for name in seconds})


def label(stage: int, ahead: int) -> str:
    """What `zero_runs` calls a stage."""
    return f"stage {stage}" + (f", {ahead} ahead" if stage == 3 else "")


def _on_rank(own, N, count, mb, forward, repeats):
    """The rank's side: everything takes as many updates, and is compared with DDP at the end."""
    import torch
    import torch.distributed as dist

    from course_lib.lab.workbench.zero_own import Yours
    from course_lib.launch import context
    from course_lib.train import emulated
    from course_lib.train.fsdp2 import fsdp2
    from course_lib.train.sharded import Sharded
    from course_lib.tune.alternate import Step, alternate

    torch.set_num_threads(1)
    costs = _fitted()

    def model(of=forward[0]):
        units = costs.units(count, mb, of)
        return emulated.equal(count, mb, units.Tf * 1e3, units.Tb * 1e3)

    ways: dict[str, Any] = {"DDP": Plain(model(), N)}
    for stage, ahead in STAGES:
        ways[label(stage, ahead)] = Library(Sharded(model(), stage=stage, prefetch=ahead), N, every=stage > 1)
    ways["yours"] = Yours(model(), *own, N)
    ways["one unit"] = Library(Sharded(model(), stage=3, units=()), N, every=True)
    ways["FSDP2"] = Stock(fsdp2(model()), N)
    for ahead in (0, 1, 2):
        ways[f"starved, {ahead} ahead"] = Library(Sharded(model(forward[1]), stage=3, prefetch=ahead), N, every=True)
    steps = {name: Step(way.update) for name, way in ways.items()}
    provenance = f"{emulated.PROVENANCE}, real AdamW, {context().spec.provenance}"
    measured = alternate(steps, repeats, 1, provenance)
    right, worst, sent, traffic = ways["DDP"].parameters(), {}, {}, dist.group.WORLD.traffic
    for name, way in ways.items():
        far = (way.parameters() - right).abs().max() / right.abs().max()
        dist.all_reduce(far, op=dist.ReduceOp.MAX)
        worst[name] = float(far)
    for name, way in ways.items():
        way.need_no_time()
        traffic.reset()
        way.update()
        sent[name] = traffic.total_bytes
    return costs, sent, worst, *measured


def _fitted(repeats: int = 5) -> Costs:
    """From the fastest of some short trains of each size, in alternation. Collective call."""
    import torch
    import torch.distributed as dist

    from course_lib.collectives import all_gather_ring, reduce_scatter_ring
    from course_lib.launch.measure import fit, train_time_s

    found = []
    for ring in (all_gather_ring, reduce_scatter_ring):
        times = {size: [] for size in SIZES}
        for _ in range(repeats + 1):
            for size in SIZES:
                buffer = torch.zeros(size // 4)
                times[size].append(train_time_s(lambda ring=ring, buffer=buffer: ring(buffer, async_op=True), 2))
        fitted = torch.tensor(fit(SIZES, [min(times[size][1:]) for size in SIZES]), dtype=torch.float64)
        dist.broadcast(fitted, 0)
        found.append(LinkCost(*fitted.tolist()))
    return Costs(*found)


class _Way:
    """A wrapped emulated model with an optimizer, and how it updates."""

    def __init__(self, model, params, N: int, every: bool) -> None:
        import torch
        import torch.distributed as dist

        self.model, self.N, self.every, self.rank = model, N, every, dist.get_rank()
        self.optimizer = torch.optim.AdamW(params, lr=LR, foreach=False)

    def update(self) -> None:
        from contextlib import nullcontext

        from course_lib.lab.workbench.gradients import loss_of

        for i in range(self.N):
            with nullcontext() if self.every or i == self.N - 1 else self.model.no_sync():
                loss_of(self.model, self.rank, i, self.N).backward()
        self.finish()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def need_no_time(self) -> None:
        """Bytes need no device time."""
        for module in self.model.modules():
            if hasattr(module, "forward_ns"):
                module.forward_ns = module.backward_ns = 0

    def finish(self) -> None:
        self.model.finish_gradient_synchronization()


class Plain(_Way):
    def __init__(self, module, N: int) -> None:
        from course_lib.train.ddp import StockDDP

        super().__init__(StockDDP(module), module.parameters(), N, every=False)

    def parameters(self):
        return _flat(self.model.module.parameters())


class Library(_Way):
    """`train.Sharded`."""

    def __init__(self, model, N: int, every: bool) -> None:
        super().__init__(model, model.shards(), N, every)

    def parameters(self):
        whole = self.model.full_state_dict()
        return _flat(whole[name] for name, _ in self.model.module.named_parameters())


class Stock(_Way):
    """FSDP2, which reduces in every backward."""

    def __init__(self, model, N: int) -> None:
        super().__init__(model, model.parameters(), N, every=True)

    def finish(self) -> None:
        """FSDP2 waits at the end of each backward."""

    def parameters(self):
        return _flat(p.full_tensor() for p in self.model.parameters())


def _flat(params):
    import torch
    return torch.cat([p.detach().flatten() for p in params])
