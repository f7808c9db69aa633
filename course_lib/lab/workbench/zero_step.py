"""The learner's `ShardedOptimizer` on real ranks beside DDP, the library's stage 1 and PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from course_lib.launch import Fabric

UPDATES, WIDTH, ROWS, MAX_NORM = 8, 16, 8, 0.2


@dataclass(frozen=True)
class Stepped:
    """A way of updating. `apart` is the largest difference of a parameter element from DDP's, on any rank, as a
    fraction of the largest element, `state` the elements that rank 0's optimizer keeps for the model's `parameters`."""

    name: str
    apart: float
    state: int
    parameters: int

    def __str__(self) -> str:
        apart = f"{self.apart:.0e} of the largest element" if self.apart else "nothing"
        return f"{self.name:>34}: state for {self.state} of {self.parameters} parameters, differs from DDP by {apart}"


class StepRuns(NamedTuple):
    """`ways` of the same updates, and what the library says of three mistakes, by the mistake."""

    ways: list[Stepped]
    refused: dict[str, str]


def step_runs(ShardedOptimizer: type, *, ranks: int = 2, fabric: str | Fabric = "loopback",
              timeout_s: float = 60.0) -> StepRuns:
    """Eight updates of a small network with clipping and AdamW, on the same ranks with the same data: yours, the
    library's stage 1, `ZeroRedundancyOptimizer`, and stage 1 clipped by each rank's own norm. Raises `OwnRunFailed`
    with one sentence for what the class does wrong on a rank."""
    from course_lib.lab.workbench.buckets import _run
    return _run(_on_rank, ShardedOptimizer, ranks=ranks, fabric=fabric, timeout_s=timeout_s)[0]


def _on_rank(ShardedOptimizer):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    right, _ = _ddp()
    found = []
    ways = {"your ShardedOptimizer": _yours(ShardedOptimizer), "the library's stage 1": _library(),
            "ZeroRedundancyOptimizer": _ddp(zero=True), "stage 1, clipped by the shard": _library(by_shard=True)}
    for name, (values, state) in ways.items():
        far = (values - right).abs().max() / right.abs().max()
        dist.all_reduce(far, op=dist.ReduceOp.MAX)
        found.append(Stepped(name, float(far), state, right.numel()))
    return StepRuns(found, {what: _said(mistake) for what, mistake in MISTAKES.items()})


def _network():
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def _batches():
    import torch.distributed as dist

    from course_lib.train.data import synthetic
    return synthetic(ROWS, WIDTH, UPDATES, rank=dist.get_rank())


def _adamw(params):
    import torch
    return torch.optim.AdamW(params, lr=0.01, eps=1e-4, foreach=False)


def _held(optimizer) -> int:
    return sum(state["exp_avg"].numel() for state in getattr(optimizer, "optim", optimizer).state.values())


def _flat(params):
    import torch
    return torch.cat([p.detach().flatten() for p in params])


def _ddp(zero: bool = False):
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from course_lib.train import StockDDP, accumulate
    from course_lib.train.clip import clip_grad_norm
    from course_lib.train.gpt import squared_loss

    model = StockDDP(_network())
    if zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, eps=1e-4, foreach=False)
    else:
        optimizer = _adamw(model.parameters())
    for batch in _batches():
        accumulate(model, [batch], squared_loss, "micro")
        clip_grad_norm(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return _flat(model.parameters()), _held(optimizer)


def _library(by_shard: bool = False):
    from course_lib.train import Sharded, accumulate
    from course_lib.train.clip import clip_grad_norm
    from course_lib.train.gpt import squared_loss

    model = Sharded(_network(), stage=1)
    optimizer = _adamw(model.shards())
    for batch in _batches():
        accumulate(model, [batch], squared_loss, "micro", every=True)
        clip_grad_norm(model.shards(), MAX_NORM) if by_shard else model.clip_grad_norm(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    whole = model.full_state_dict()
    return _flat(whole[name] for name, _ in model.module.named_parameters()), _held(optimizer)


def _yours(ShardedOptimizer):
    import torch

    from course_lib.collectives import reduce_scatter_ring
    from course_lib.lab.workbench.updates import told
    from course_lib.train.gpt import squared_loss

    network = _network()
    params = list(network.parameters())
    flat = _flat(params)
    for param, part in zip(params, flat.split([p.numel() for p in params])):
        param.data = part.view_as(param)
    made = []

    def make_optimizer(given):
        made.append(_adamw(given))
        return made[-1]

    mine = told(ShardedOptimizer, flat, StepWire(), make_optimizer,
                shown="ShardedOptimizer(flat, wire, make_optimizer)")
    for batch in _batches():
        network.zero_grad()
        summed, count = squared_loss(network, batch)
        (summed / count).backward()
        gradient = torch.cat([p.grad.flatten() for p in params])
        reduce_scatter_ring(gradient, op="mean")
        told(mine.step, gradient, MAX_NORM, shown="step(gradient, max_norm)")
    return flat.clone(), sum(_held(optimizer) for optimizer in made)


def _said(mistake: Callable[[], None]) -> str:
    try:
        mistake()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def _steps_the_module() -> None:
    from course_lib.train import Sharded

    model = Sharded(_network(), stage=3)
    _adamw(model.module.parameters()).step()


def _saves_the_module() -> None:
    from course_lib.train import Sharded

    Sharded(_network(), stage=3).state_dict()


def _skips_on_one_rank() -> None:
    """As whoever looks for an overflow in the shards of one rank alone."""
    import torch.distributed as dist

    from course_lib.train import Sharded, accumulate
    from course_lib.train.gpt import squared_loss

    model = Sharded(_network(), stage=2)
    optimizer = _adamw(model.shards())
    for batch in _batches():
        accumulate(model, [batch], squared_loss, "micro", every=True)
        if dist.get_rank() == 0:
            optimizer.step()


MISTAKES = {"an optimizer made of model.parameters()": _steps_the_module,
            "rank 0 saves model.state_dict()": _saves_the_module,
            "one rank leaves a step out": _skips_on_one_rank}


class StepWire:
    """Two collectives over all ranks, which block and work in place."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def all_reduce(self, tensor) -> None:
        """Sum over the ranks."""
        import torch.distributed as dist

        dist.all_reduce(tensor)

    def all_gather(self, flat) -> None:
        """Every rank's own segment of `flat.tensor_split(ranks)` to all."""
        from course_lib.collectives import all_gather_ring

        all_gather_ring(flat)
