"""A wrapped model in training, and ways to do on one rank what the others do not."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from course_lib.train.control import SynchronizationError
from course_lib.train.ddp import wrap
from tests.train.cases import mlp

RANKS = 3
SMALL = 0.0004
STRATEGIES = {"serial": ("serial", {}), "no_sync": ("no_sync", {}), "bucketed": ("bucketed", {"bucket_mb": SMALL})}


class Boom(Exception):
    pass


class Bomb(torch.autograd.Function):
    """Raises in backward where it is armed."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Bomb.armed:
            raise Boom
        return grad


class Mined(nn.Module):
    """An MLP with a bomb between its layers: later layers have their gradients when it goes off."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(Bomb.apply(x) if i == 2 else x)
        return x


class Trainer:
    """A wrapped model, its optimizer, and windows with an odd one out."""

    def __init__(self, strategy: str, kind=mlp, **options) -> None:
        torch.manual_seed(0)
        name, defaults = STRATEGIES[strategy]
        self.model = wrap(name, kind(), **{**defaults, **options})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batch = 0

    def loss(self) -> torch.Tensor:
        self.batch += 1
        generator = torch.Generator().manual_seed(self.batch * 10 + dist.get_rank())
        return self.model(torch.randn(4, 6, generator=generator)).square().mean()

    def step(self) -> None:
        self.model.finish_gradient_synchronization()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def window(self) -> None:
        with self.model.no_sync():
            self.loss().backward()
        self.loss().backward()
        self.step()

    def goes_on(self) -> bool:
        """Two more windows, and all ranks still hold the same parameters (which moved)."""
        before = parameters(self.model)
        self.optimizer.zero_grad()
        for _ in range(2):
            self.window()
        mine = parameters(self.model)
        sums = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(sums, mine)
        return all(torch.equal(s, mine) for s in sums) and not torch.equal(mine, before)


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def odd_one(rank: int = 1) -> bool:
    return dist.get_rank() == rank


def error_of(action) -> str:
    try:
        action()
    except (SynchronizationError, Boom) as error:
        return f"{type(error).__name__}: {error}"
    return ""
