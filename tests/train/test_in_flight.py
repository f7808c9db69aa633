"""On a wire slower than compute nearly everything is in flight: a parameter is not used before it has arrived, and a
buffer that travels is neither given away nor written to."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.launch import Fabric, run
from course_lib.train import Sharded, wrap
from tests.train.cases import make_optimizer, state
from tests.train.on_ranks import RANKS, model_of

WIDTH, LAYERS, WINDOWS, MICRO_STEPS = 32, 5, 2, 2
LAYER_MB = 4 * WIDTH * WIDTH / 2**20
BUCKETS = {"bucket_mb": LAYER_MB, "first_bucket_mb": None}
STRATEGIES = {"bucketed": BUCKETS, "every_step": BUCKETS, "delayed": BUCKETS | {"delay": 0}, "ddp": BUCKETS,
              "step_per_bucket": BUCKETS, "zero1": {}, "zero2": {}, "zero3": {}}
WIRE = Fabric(gbit=0.02, kind="paced")
"""A layer takes 1.6 ms on it, and some 0.1 ms to compute."""


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def loss_of(model: nn.Module, i: int, rank: int) -> torch.Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * i + rank))
    return model(x).square().sum()


def trained(name: str) -> dict[str, torch.Tensor]:
    model = wrap(name, model_of(deep), **STRATEGIES[name])
    optimizer = make_optimizer(model.shards() if isinstance(model, Sharded) else model.parameters())
    if name == "step_per_bucket":
        model.take_optimizer(optimizer)
    silent = name in ("bucketed", "delayed", "step_per_bucket", "ddp")
    for window in range(WINDOWS):
        for i in range(MICRO_STEPS):
            with model.no_sync() if silent and i < MICRO_STEPS - 1 else nullcontext():
                loss = loss_of(model, MICRO_STEPS * window + i, dist.get_rank())
            loss.backward()
            # memory that was given away is written to at once
            spoilt = [torch.full((WIDTH * WIDTH,), float("nan")) for _ in range(2 * LAYERS)]
            del spoilt
        model.finish_gradient_synchronization()
        if name != "step_per_bucket":
            optimizer.step()
        optimizer.zero_grad()
    return model.full_state_dict() if isinstance(model, Sharded) else state(model.module)


def everything() -> dict:
    torch.set_num_threads(1)
    return {name: trained(name) for name in STRATEGIES}


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return run(everything, ranks=RANKS, fabric=WIRE, timeout_s=60)


@pytest.fixture(scope="module")
def want() -> dict[str, torch.Tensor]:
    model = model_of(deep)
    optimizer = make_optimizer(model.parameters())
    for window in range(WINDOWS):
        for i in range(MICRO_STEPS):
            for rank in range(RANKS):
                (loss_of(model, MICRO_STEPS * window + i, rank) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_parameters_are_those_of_one_process(name: str, want: dict, results: list[dict]) -> None:
    for rank in results:
        for key, tensor in want.items():
            torch.testing.assert_close(rank[name][key], tensor, rtol=1e-5, atol=1e-5, msg=f"{name}, {key}")
