"""Whole updates of ZeRO in alternation on real ranks: the learner's stage 3, the library's stages, DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from course_lib.lab.errors import LabError
from course_lib.launch import Fabric, run
from course_lib.simulate.link import LinkCost
from course_lib.simulate.zero import Units
from course_lib.timeline import Timeline
from course_lib.tune.sweep import MB, Measured

LR = 1e-3
SIZES = (MB // 2, 2 * MB)
"""Bytes for `ring_costs`: smaller segments would pass within the burst that a shaped wire allows."""


class Costs(NamedTuple):
    """What an all-gather and a reduce-scatter of S bytes cost, as rings, on this wire."""

    gather: LinkCost
    reduce: LinkCost


def ring_costs(*, ranks: int = 2, fabric: str | Fabric = "auto", repeats: int = 5) -> Costs:
    """Fitted from the fastest of `repeats` short trains of each size. Raises `LabError` for one rank, which sends
    nothing."""
    if ranks < 2:
        raise LabError("ring_costs: one rank sends nothing; take ranks=2 or more.")
    return run(_costs_on_rank, repeats, ranks=ranks, fabric=fabric, timeout_s=60)[0]


def _costs_on_rank(repeats):
    import torch
    import torch.distributed as dist

    from course_lib.collectives import all_gather_ring, reduce_scatter_ring
    from course_lib.launch.measure import fit, train_time_s

    found = []
    for ring in (all_gather_ring, reduce_scatter_ring):
        times = {size: [] for size in SIZES}
        for _ in range(repeats + 1):  # in alternation, so that a busy moment does not fall on one size alone
            for size in SIZES:
                buffer = torch.zeros(size // 4)
                times[size].append(train_time_s(lambda ring=ring, buffer=buffer: ring(buffer, async_op=True), 2))
        fitted = torch.tensor(fit(SIZES, [min(times[size][1:]) for size in SIZES]), dtype=torch.float64)
        dist.broadcast(fitted, 0)
        found.append(LinkCost(*fitted.tolist()))
    return Costs(*found)


def units_for(costs: Costs, count: int = 6, mb: float = 0.5, forward: float = 1.3) -> Units:
    """Equal units whose forward takes `forward` times as long as the gather of one, and whose backward twice that."""
    Tf = forward * costs.gather.cost(mb * MB)
    return Units(count, mb * MB, Tf, 2 * Tf)


@dataclass(frozen=True)
class Zeroed(Measured):
    """A way of updating. `sent` are the bytes that rank 0 sends in one update: of our rings what they hand to the wire,
    of stock collectives what a ring would send. `from_ddp` is the largest difference of a parameter element, on any
    rank, from DDP's after as many updates, as a fraction of the largest element."""

    sent: float
    from_ddp: float


def zero_runs(units: Units, N: int, ScatterBuckets: type | None = None, run_pass: Callable | None = None, *,
              stages: Sequence[tuple[int, int]] = ((1, 1), (2, 1), (3, 0), (3, 1)), twin: bool = False,
              one_unit: bool = False, ahead: int = 1, ranks: int = 2, fabric: str | Fabric = "auto", repeats: int = 3,
              timeout_s: float = 120.0) -> dict[str, Zeroed]:
    """Time updates of N micro-steps and a step of AdamW, in alternation on the same ranks: DDP, the library's
    `stages` (stage, units ahead), and where asked for, `"yours"` with the pieces of 12.2 and 12.3, stock FSDP2, and
    stage 3 with the whole model as one unit.

    Raises `OwnRunFailed` with one sentence for whatever a piece does wrong on a rank, a hang included.
    """
    from course_lib.lab.workbench import _run

    if (ScatterBuckets is None) != (run_pass is None):
        raise LabError("zero_runs: your stage 3 takes both, the class of 12.2 and the function of 12.3.")
    own = None if run_pass is None else (ScatterBuckets, run_pass, ahead)
    rows = _run(_on_rank, units, N, tuple(stages), own, twin, one_unit, repeats, ranks=ranks, fabric=fabric,
                timeout_s=timeout_s)
    sent, worst, seconds, _ = rows[0]
    return {name: Zeroed(name, tuple(seconds[name]), Timeline.merge(row[3][name] for row in rows), sent[name],
                         worst[name]) for name in seconds}


def label(stage: int, ahead: int) -> str:
    """What `zero_runs` calls a stage."""
    return f"stage {stage}" + (f", {ahead} ahead" if stage == 3 else "")


def _on_rank(units, N, stages, own, twin, one_unit, repeats):
    """The rank's side: everything takes as many updates, and is compared with DDP at the end."""
    import torch
    import torch.distributed as dist

    from course_lib.lab.workbench_zero_own import Yours
    from course_lib.launch import context
    from course_lib.train import emulated
    from course_lib.train.fsdp2 import fsdp2
    from course_lib.train.sharded import Sharded
    from course_lib.tune.alternate import Step, alternate

    torch.set_num_threads(1)

    def model():
        return emulated.equal(units.count, units.bytes / MB, units.Tf * 1e3, units.Tb * 1e3)

    ways: dict[str, Any] = {"DDP": Plain(model(), N)}
    for stage, ahead in stages:
        ways[label(stage, ahead)] = Library(Sharded(model(), stage=stage, prefetch=ahead), N, every=stage > 1)
    if own is not None:
        ways["yours"] = Yours(model(), *own, N)
    if one_unit:
        ways["one unit"] = Library(Sharded(model(), stage=3, units=()), N, every=True)
    if twin:
        ways["FSDP2"] = Stock(fsdp2(model()), N)
    steps = {name: Step(way.update) for name, way in ways.items()}
    provenance = f"{emulated.PROVENANCE}, real AdamW, {context().spec.provenance}"
    measured = alternate(steps, repeats, 1, provenance)
    right, worst, sent, traffic = ways["DDP"].parameters(), {}, {}, dist.group.WORLD.traffic
    for name, way in ways.items():
        far = (way.parameters() - right).abs().max() / right.abs().max()
        dist.all_reduce(far, op=dist.ReduceOp.MAX)
        worst[name] = float(far)
    for name, way in ways.items():
        way.prepare_untimed()
        traffic.reset()
        way.update()
        sent[name] = traffic.total_bytes
    return sent, worst, *measured


class _Way:
    """A wrapped emulated model with an optimizer, and how it updates."""

    def __init__(self, model, params, N: int, every: bool) -> None:
        import torch
        import torch.distributed as dist

        self.model, self.N, self.every, self.rank = model, N, every, dist.get_rank()
        self.optimizer = torch.optim.AdamW(params, lr=LR, foreach=False)

    def update(self) -> None:
        from contextlib import nullcontext

        from course_lib.lab.workbench_gradients import loss_of

        for i in range(self.N):
            with nullcontext() if self.every or i == self.N - 1 else self.model.no_sync():
                loss_of(self.model, self.rank, i, self.N).backward()
        self.finish()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def prepare_untimed(self) -> None:
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
