"""What the tests of tensor-parallel layers share: a small model with rough parameters, and comparisons."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from course_lib.train.gpt import GPT, GPTConfig, next_byte_loss

VOCAB, ROWS, TIME = 11, 3, 8
TOLERANCE = 1e-12  # of float64: sums over ranks round in another order


def every_degree(body: Callable[[dist.ProcessGroup | None], object]) -> dict[int, object]:
    """What `body(group)` gives on this rank for groups of 1, 2 and 4 ranks, as far as the run has that many."""
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    degrees = [degree for degree in (1, 2, 4) if degree <= ranks]
    groups = {degree: dist.new_subgroups(degree)[0] for degree in degrees}
    return {degree: body(group) for degree, group in groups.items()}


def rough(module: nn.Module, seed: int = 0) -> nn.Module:
    """In float64, with every parameter random: a bias or a norm left at its start hides mistakes."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.4)
    return module


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gpt(**config) -> GPT:
    return rough(GPT(GPTConfig(**{"vocab": VOCAB, "length": 12, "layers": 2, "heads": 4, "width": 16} | config)))


def batch(seed: int = 0, time: int = TIME) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of the whole vocabulary, some of them left out."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(VOCAB, (ROWS, time), generator=generator) for _ in range(2))
    y[0, time // 2:] = -100
    return x, y


def plain(model: GPT, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Loss and gradients in one process."""
    model.zero_grad()
    loss, _ = next_byte_loss(model, batch(seed))
    loss.backward()
    return loss, {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}


def apart(got: dict, want: dict) -> dict[str, float]:
    """The largest difference by name, of those that differ."""
    assert got.keys() == want.keys()
    out = {}
    for name, tensor in want.items():
        if tensor is None or got[name] is None:
            if tensor is not got[name]:
                out[name] = float("inf")
        elif not torch.allclose(got[name], tensor, rtol=TOLERANCE, atol=TOLERANCE):
            out[name] = float((got[name] - tensor).abs().max())
    return out
