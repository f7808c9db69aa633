"""A parameter that one rank uses, and only in an early micro-step, is reduced like any other."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from course_lib.launch import run
from course_lib.train import Sharded, wrap
from tests.train.cases import Branches, make_optimizer, state
from tests.train.on_ranks import OURS, RANKS, inputs, model_of

UNUSED = {"find_unused": True, "bucket_mb": 0.0001}
STRATEGIES = {name: (strategy, options | UNUSED if strategy == "bucketed" else options)
              for name, (strategy, options) in OURS.items()}
STRATEGIES |= {"ddp": ("ddp", UNUSED), "every_step": ("every_step", UNUSED), "step": ("step_per_bucket", UNUSED),
               "zero1": ("zero1", {"find_unused": True}),
               **{f"zero{n}": (f"zero{n}", {"find_unused": True, "whole_gradients": True}) for n in (2, 3)}}
LEFT, RIGHT = 1.0, -1.0
USED = (LEFT, RIGHT, RIGHT), (RIGHT, RIGHT, RIGHT)
"""By rank and micro-step. In the second window the ranks change places."""


def batch(window: int, i: int, rank: int) -> torch.Tensor:
    x = inputs(3 * window + i, rank)
    x[0, 0] = USED[(rank + window) % RANKS][i]
    return x


def trained(name: str) -> dict[str, torch.Tensor]:
    strategy, options = STRATEGIES[name]
    model = wrap(strategy, model_of(Branches), **options)
    optimizer = make_optimizer(model.shards() if isinstance(model, Sharded) else model.parameters())
    if strategy == "step_per_bucket":
        model.take_optimizer(optimizer)
    for window in range(2):
        for i in range(3):
            with model.no_sync() if i < 2 else nullcontext():
                loss = model(batch(window, i, dist.get_rank())).square().sum()
            loss.backward()
        model.finish_gradient_synchronization()
        if strategy != "step_per_bucket":
            optimizer.step()
        optimizer.zero_grad()
    return model.full_state_dict() if isinstance(model, Sharded) else state(model.module)


def everything() -> dict:
    torch.set_num_threads(1)
    return {name: trained(name) for name in STRATEGIES}


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return run(everything, ranks=RANKS, fabric="loopback")


@pytest.mark.parametrize("name", STRATEGIES)
def test_used_by_one_rank_under_no_sync_alone(name: str, results: list[dict]) -> None:
    """Momentum and weight decay leave alone what no rank uses (stock DDP gives it zeros)."""
    want = model_of(Branches)
    optimizer = make_optimizer(want.parameters())
    for window in range(2):
        for i in range(3):
            for rank in range(RANKS):
                (want(batch(window, i, rank)).square().sum() / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank in results:
        for key, tensor in state(want).items():
            if name != "ddp" or not key.startswith("never"):
                torch.testing.assert_close(rank[name][key], tensor, rtol=1e-5, atol=1e-5, msg=f"{name}, {key}")
