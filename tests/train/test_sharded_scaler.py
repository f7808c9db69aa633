"""A loss scaler with sharded gradients: an overflow in one rank's shard leaves out the step of all, or is an error."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD

from course_lib.launch import run
from course_lib.train.control import SynchronizationError
from course_lib.train.gpt import squared_loss
from course_lib.train.reference import reference
from course_lib.train.sharded import Sharded
from course_lib.train.window import accumulate
from tests.train.cases import make_model, windows
from tests.train.on_ranks import RANKS

MICRO_STEPS = 3
OVERFLOWS = 1
"""The window in which one element of the gradient overflows, so that it does so in one rank's shard alone."""


def sgd(parameters) -> SGD:
    return SGD(parameters, lr=0.1)


def trained(stage: int, scaler) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Whole parameters and the scale after each window."""
    model = Sharded(make_model("equal", seed=dist.get_rank()), stage=stage)
    optimizer = sgd(model.shards())
    scales = []
    for k, window in enumerate(windows("equal", dist.get_rank(), MICRO_STEPS)):
        def loss_of(model, batch):
            summed, count = squared_loss(model, batch)
            return scaler.scale(summed), count

        accumulate(model, window, loss_of, "micro", every=stage > 1)
        last = model.shards()[0].grad
        if k == OVERFLOWS and dist.get_rank() == 0:
            last[0] = float("inf")
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return model.full_state_dict(), scales


def everything() -> dict:
    torch.set_num_threads(1)
    out = {}
    for stage in (1, 2, 3):
        out[stage] = trained(stage, ShardedGradScaler("cpu", init_scale=1024.0))
    try:
        out["plain"] = trained(3, torch.amp.GradScaler("cpu", init_scale=1024.0))
    except SynchronizationError as error:
        out["plain"] = str(error)
    return out


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return run(everything, ranks=RANKS, fabric="loopback")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_ranks_leave_out_the_window(stage: int, results: list[dict]) -> None:
    per_rank = [windows("equal", rank, MICRO_STEPS) for rank in range(RANKS)]
    kept = [window for k, window in enumerate(zip(*per_rank)) if k != OVERFLOWS]
    want = reference(lambda: make_model("equal"), kept, squared_loss, sgd, "micro")
    for rank in results:
        state, scales = rank[stage]
        assert scales == [1024.0, 512.0, 512.0]
        for name, tensor in want.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-5)


def test_a_scaler_that_looks_at_its_own_shards_alone_is_an_error(results: list[dict]) -> None:
    for rank in results:
        assert "rank 0: 1 steps" in rank["plain"] and "rank 1: 2 steps" in rank["plain"]
        assert "ShardedGradScaler" in rank["plain"]
