"""Sums in half precision: over the micro-steps of a window, and over ranks."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from course_lib.launch import run
from course_lib.train import wrap
from tests.train.on_ranks import OURS, RANKS, SMALL

STRATEGIES = {**OURS, "ddp": ("ddp", {}), "every_step": ("every_step", {"bucket_mb": SMALL})}
MICRO_STEPS = 300


def ones(strategy: str, parameters: torch.dtype) -> float:
    """The gradient after a window in which that of each micro-step is 1, computed in bfloat16."""
    name, options = STRATEGIES[strategy]
    layer = nn.Linear(1, 1, bias=False, dtype=parameters)
    model = wrap(name, layer, **options)
    for i in range(MICRO_STEPS):
        with model.no_sync() if i < MICRO_STEPS - 1 else nullcontext(), torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(1, 1)).sum()
        loss.backward()
    model.finish_gradient_synchronization()
    return float(layer.weight.grad)


def large(strategy: str) -> float:
    """The mean of a float16 gradient of 40000 on each rank: their sum is more than float16 holds."""
    name, options = STRATEGIES[strategy]
    layer = nn.Linear(1, 1, bias=False).half()
    model = wrap(name, layer, **options)
    model(torch.full((1, 1), 40000.0).half()).sum().backward()
    model.finish_gradient_synchronization()
    return float(layer.weight.grad)


def everything() -> dict:
    torch.set_num_threads(1)
    return {s: (ones(s, torch.bfloat16), ones(s, torch.float32), large(s)) for s in STRATEGIES}


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return run(everything, ranks=RANKS, fabric="loopback")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_sum_of_a_window_is_as_exact_as_its_parameters(strategy: str, results: list[dict]) -> None:
    """A bf16 sum of ones stops at 256. Parameters in fp32 under autocast keep the sum in fp32."""
    for rank in results:
        assert rank[strategy][:2] == (256, MICRO_STEPS)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_mean_over_ranks_does_not_overflow(strategy: str, results: list[dict]) -> None:
    assert [rank[strategy][2] for rank in results] == [40000] * RANKS


@pytest.mark.parametrize(("micro_steps", "in_bf16", "in_fp32"), [(8, 0.0040, 0.0016), (32, 0.0068, 0.0015),
                                                                 (128, 0.0121, 0.0011), (512, 0.0227, 0.0007)])
def test_the_error_of_a_bf16_sum_grows_with_the_window(micro_steps: int, in_bf16: float, in_fp32: float) -> None:
    """The relative L2 error of a sum of bf16 gradients (mean 0.1, spread 1), in bf16 and in fp32."""
    generator = torch.Generator().manual_seed(0)
    exact, half, full = (torch.zeros(4096, dtype=d) for d in (torch.float64, torch.bfloat16, torch.float32))
    for _ in range(micro_steps):
        gradient = 0.1 + torch.randn(4096, generator=generator)
        for total, part in ((exact, gradient), (half, gradient.bfloat16()), (full, gradient.bfloat16())):
            total += part
    for total, expected in ((half, in_bf16), (full, in_fp32)):
        assert float((total.double() - exact).norm() / exact.norm()) == pytest.approx(expected, rel=0.1)
