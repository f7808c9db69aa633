"""What the tests that look at gradients on two ranks share."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.launch import run
from tests.train.cases import mlp

RANKS = 2
SMALL = 0.0004
OURS = {"serial": ("serial", {}), "serial flat": ("serial", {"flat": True}), "no_sync": ("no_sync", {}),
        "bucketed": ("bucketed", {"bucket_mb": SMALL}),
        "bucketed copies": ("bucketed", {"bucket_mb": SMALL, "gradient_as_bucket_view": False})}
def model_of(kind=mlp, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def inputs(i: int = 0, rank: int | None = None) -> torch.Tensor:
    """Batch i of a rank: (4, 6)."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * i + rank))


def backward(model: nn.Module, i: int = 0) -> None:
    model(inputs(i)).square().sum().backward()


def grads(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def alone(kind, batches: list[int], op: str, ranks: int = RANKS) -> list[torch.Tensor]:
    """The gradient one process finds for these batches of all ranks."""
    model = model_of(kind)
    for i in batches:
        for rank in range(ranks):
            (model(inputs(i, rank)).square().sum() / (ranks if op == "mean" else 1)).backward()
    return grads(model)


def same(a: list, b: list, tolerance: float = 1e-5) -> bool:
    return all((x is None and y is None) or torch.allclose(x, y, rtol=tolerance, atol=tolerance) for x, y in zip(a, b))


def sent() -> tuple[int, float]:
    """All-reduces and their bytes (ring formula) since the last call."""
    traffic = dist.group.WORLD.traffic
    out = traffic.calls["all_reduce"], traffic.bytes["all_reduce"]
    traffic.reset()
    return out


def together(ranks: int = RANKS, timeout_s: float = 120.0):
    """For a test file: a decorator and a fixture. What the decorator takes runs on all ranks, together with all others
    of the file; by the fixture its test reads what it returned, one a rank."""
    checks = []

    def on_ranks(check):
        checks.append(check)
        return check

    @pytest.fixture(scope="module")
    def got():
        results = run(_all, tuple(checks), ranks=ranks, fabric="loopback", timeout_s=timeout_s)
        return lambda check: [r[check.__name__] for r in results]

    return on_ranks, got


def _all(checks) -> dict:
    torch.set_num_threads(1)
    return {check.__name__: check() for check in checks}
