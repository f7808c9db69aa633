"""ZeRO beside PyTorch's own on the same ranks: ZeroRedundancyOptimizer and FSDP2, their results, bytes and memory."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from course_lib.launch import run
from course_lib.train import Sharded, StockDDP, accumulate, data
from course_lib.train.fsdp2 import fsdp2
from course_lib.train.gpt import squared_loss
from course_lib.train.live_bytes import peak_bytes
from tests.train.cases import make_optimizer, mlp

pytestmark = pytest.mark.slow
WINDOWS, MICRO_STEPS = 3, 2
WIDTH, LAYERS = 256, 8


def batches(window: int) -> list:
    return list(data.synthetic(4, 6, MICRO_STEPS, seed=window, rank=dist.get_rank()))


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


def ours(stage: int) -> dict[str, torch.Tensor]:
    model = Sharded(model_of(), stage=stage)
    optimizer = make_optimizer(model.shards())
    for window in range(WINDOWS):
        accumulate(model, batches(window), squared_loss, "micro", every=stage > 1)
        optimizer.step()
        optimizer.zero_grad()
    return model.full_state_dict()


def zero_redundancy() -> dict[str, torch.Tensor]:
    model = StockDDP(model_of())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1)
    for window in range(WINDOWS):
        accumulate(model, batches(window), squared_loss, "micro")
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.module.state_dict().items()}


def fully_sharded(our_collectives: bool) -> dict[str, torch.Tensor]:
    model = fsdp2(model_of(), our_collectives=our_collectives)
    optimizer = make_optimizer(model.parameters())
    for window in range(WINDOWS):
        for batch in batches(window):
            summed, count = squared_loss(model, batch)
            (summed / (count * MICRO_STEPS)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in model.state_dict().items()}


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def step_of(kind: str, micro_steps: int = 1, **options):
    """A step of a model of `LAYERS` equal units, under an optimizer without state."""
    x = torch.ones(2, WIDTH)
    if kind.startswith("stage"):
        model = Sharded(deep(), stage=int(kind[-1]), **options)
        optimizer = torch.optim.SGD(model.shards(), lr=0.01, foreach=False)
    else:
        model = fsdp2(deep(), our_collectives=kind == "fsdp2 on our rings")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)

    def step() -> None:
        for i in range(micro_steps):
            with model.no_sync() if options and i < micro_steps - 1 else nullcontext():
                model(x).square().mean().backward()
        if kind.startswith("stage"):
            model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()

    return step


KINDS = ("stage 1", "stage 2", "stage 3", "fsdp2", "fsdp2 on our rings")


def sent(kind: str) -> float:
    step = step_of(kind)
    step()
    dist.group.WORLD.traffic.reset()
    step()
    return dist.group.WORLD.traffic.total_bytes


def everything() -> dict:
    torch.set_num_threads(1)
    return {"zero redundancy": zero_redundancy(), "fsdp2": fully_sharded(False),
            "fsdp2 on our rings": fully_sharded(True), **{f"stage {s}": ours(s) for s in (1, 2, 3)},
            "peak": {kind: peak_bytes(step_of(kind)) for kind in KINDS},
            "three": peak_bytes(step_of("stage 3", 3)),
            "three, fsdp2": peak_bytes(step_of("fsdp2 on our rings", 3)),
            "three under no_sync": peak_bytes(step_of("stage 3", 3, whole_gradients=True)),
            "sent": {kind: sent(kind) for kind in KINDS}}


@pytest.fixture(scope="module")
def got() -> list[dict]:
    return run(everything, ranks=2, fabric="loopback")


@pytest.mark.parametrize("twin", ["zero redundancy", "fsdp2", "fsdp2 on our rings"])
def test_parameters_are_those_of_pytorch(twin: str, got: list[dict]) -> None:
    for rank in got:
        for stage in (1, 2, 3):
            for name, value in rank[twin].items():
                torch.testing.assert_close(rank[f"stage {stage}"][name], value, rtol=1e-5, atol=1e-6)


def test_peak_of_live_bytes(got: list[dict]) -> None:
    """Each stage takes less than the one before, and stage 3 no more than FSDP2 with the same collectives."""
    for rank in got:
        peak = rank["peak"]
        assert peak["stage 3"] < peak["stage 2"] < peak["stage 1"]
        assert peak["stage 3"] <= peak["fsdp2 on our rings"]


def test_no_sync_brings_the_whole_gradient_back(got: list[dict]) -> None:
    """From the second micro-step on the shards of gradient are full when two units are gathered. Under no_sync() the
    whole gradient stays on every rank."""
    whole, activation = WIDTH * WIDTH * 4 * LAYERS, 2 * WIDTH * 4
    for rank in got:
        assert rank["three"] <= rank["peak"]["stage 3"] + 2 * whole / LAYERS
        assert rank["three"] <= rank["three, fsdp2"] + activation
        assert rank["three under no_sync"] >= rank["three"] + whole / 4


def test_bytes_beside_pytorch(got: list[dict]) -> None:
    """FSDP2 gathers the last unit once more, as nothing is left gathered between forward and backward."""
    half = WIDTH * WIDTH * 4 * LAYERS / 2
    for rank in got:
        assert rank["sent"]["stage 3"] == pytest.approx((3 - 1 / LAYERS) * half, rel=0.05)
        assert rank["sent"]["fsdp2 on our rings"] <= 3 * half * 1.05
        assert rank["sent"]["stage 3"] <= rank["sent"]["fsdp2 on our rings"] * 1.001
