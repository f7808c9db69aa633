"""ZeRO where the group is no Wire of ours: plain gloo, and the group's own collectives as a GPU's tensors take them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from course_lib.launch import run
from course_lib.train import sharded_wire
from course_lib.train.sharded import Sharded
from tests.train.on_ranks import RANKS

WIDTH, UPDATES = 6, 3


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))  # even sizes: gloo gathers no other lists


def batch(i: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * i + rank))


def trained(stage: int, op: str, by_the_group: bool) -> dict[str, torch.Tensor]:
    before = sharded_wire._by_the_group
    sharded_wire._by_the_group = lambda flat: by_the_group
    try:
        wrapped = Sharded(model(), stage=stage, op=op, process_group=dist.new_group(backend="gloo"))
        optimizer = SGD(wrapped.shards(), lr=0.1)
        for i in range(UPDATES):
            wrapped(batch(i, dist.get_rank())).square().mean().backward()
            wrapped(batch(i, dist.get_rank()) / 2).square().mean().backward()
            wrapped.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad()
        return wrapped.full_state_dict()
    finally:
        sharded_wire._by_the_group = before


def everything() -> dict:
    torch.set_num_threads(1)
    return {(stage, op, own): trained(stage, op, own)
            for stage in (1, 2, 3) for op in ("mean", "sum") for own in (False, True)}


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return run(everything, ranks=RANKS, fabric="loopback")


@pytest.mark.parametrize("own", [False, True], ids=["our rings", "the group's own"])
@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_are_those_of_one_process(stage: int, op: str, own: bool, results: list[dict]) -> None:
    alone = model()
    optimizer = SGD(alone.parameters(), lr=0.1)
    for i in range(UPDATES):
        for rank in range(RANKS):
            for x in (batch(i, rank), batch(i, rank) / 2):
                (alone(x).square().mean() / (RANKS if op == "mean" else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank in results:
        for name, tensor in alone.state_dict().items():
            torch.testing.assert_close(rank[stage, op, own][name], tensor, rtol=1e-5, atol=1e-6)
