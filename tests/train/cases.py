"""Models and windows that strategies must get right, and the loop that runs them on a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib.train import data, emulated
from course_lib.train.gpt import GPT, GPTConfig, next_byte_loss, squared_loss

WINDOWS = 3


class Tied(nn.Module):
    """One layer used twice, and one weight shared by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.there, self.back = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.back.weight = self.there.weight
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        return self.out(self.back(torch.tanh(self.there(torch.tanh(self.twice(self.twice(x)))))))


class Branches(nn.Module):
    """Which branch runs depends on the data; `never` runs on no rank."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.left, self.right, self.out = (nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6),
                                                       nn.Linear(6, 1))

    def forward(self, x):
        return self.out(torch.tanh(self.left(x) if x[0, 0] > 0 else self.right(x)))


class Odd(nn.Module):
    """Odd sizes, a scalar, a parameter without elements, and layers registered in the order of no use."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(13, 1), nn.Linear(6, 7)
        self.scalar, self.empty = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.empty(0, 3))
        self.middle = nn.Linear(7, 13)

    def forward(self, x):
        x = torch.tanh(self.middle(torch.tanh(self.first(x)) * self.scalar))
        return self.last(x) + self.empty.sum()


class MixedTypes(nn.Module):
    """Half of the model in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.out = nn.Linear(6, 8), nn.Linear(8, 8).bfloat16(), nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.middle(torch.tanh(self.first(x)).bfloat16()).float())


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), nn.Linear(6, 1)

    def forward(self, x):
        return self.out(checkpoint(self.inner, x, use_reentrant=False))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def frozen() -> nn.Module:
    model = mlp()
    model[2].requires_grad_(False)
    return model


def half() -> nn.Module:
    return mlp().bfloat16()


def tiny_gpt() -> nn.Module:
    return GPT(GPTConfig(length=16, layers=1, heads=2, width=12))


def tiny_emulated() -> nn.Module:
    return emulated.equal(layers=5, mb=0.0005, forward_ms=0, backward_ms=0, parameters=2)


def emulated_loss(model, batch):
    return model(batch[0][:, 0]).square().sum(), len(batch[0])


def half_loss(model, batch):
    return squared_loss(model, (batch[0].bfloat16(), batch[1].bfloat16()))


@dataclass(frozen=True)
class Case:
    """`atol` is the tolerance on parameters after `WINDOWS` updates; parameters are of order 1."""

    make: Callable[[], nn.Module]
    loss_of: Callable = squared_loss
    unused: bool = False
    ragged: bool = False
    normalise: str = "micro"
    atol: float = 1e-5
    options: dict = field(default_factory=dict)


CASES = {
    "equal": Case(mlp),
    "tied": Case(Tied),
    "frozen": Case(frozen),
    "unused": Case(Branches, unused=True),
    "odd sizes": Case(Odd),
    "ragged tail": Case(tiny_gpt, next_byte_loss, ragged=True, normalise="tokens"),
    # one bfloat16 rounding of a parameter of size 1 is 0.004, and there are WINDOWS of them
    "bf16": Case(half, half_loss, atol=0.02),
    "mixed types": Case(MixedTypes, atol=0.02),
    "checkpointed": Case(Checkpointed),
    "emulated": Case(tiny_emulated, emulated_loss),
}


def make_model(case: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return CASES[case].make()


def make_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Weight decay, so that a gradient of zeros where there should be none shows."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1)


def windows(case: str, rank: int, micro_steps: int) -> list[list[Any]]:
    """This rank's micro-batches of every update; the last window is short when it can be."""
    sizes = [micro_steps] * (WINDOWS - 1) + [max(1, micro_steps - 1)]
    if CASES[case].ragged:
        source = data.batches(data.text(0.1), 3, 12, sum(sizes), seed=5, rank=rank, ragged=True)
    else:
        source = data.synthetic(4, 6, sum(sizes), seed=5, rank=rank)
    return [[next(source) for _ in range(n)] for n in sizes]


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
