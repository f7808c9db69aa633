"""A loss scaler and clipping belong at the end of a window, once, and every rank decides alike about the step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.launch import run
from course_lib.train import EveryStep, wrap
from course_lib.train.clip import clip_grad_norm, global_norm
from course_lib.train.gpt import squared_loss
from course_lib.train.reference import reference
from course_lib.train.window import accumulate
from tests.train.cases import make_model, make_optimizer, state, windows
from tests.train.on_ranks import OURS, RANKS, SMALL, sent

STRATEGIES = {**OURS, "ddp": ("ddp", {"bucket_mb": SMALL, "first_bucket_mb": None}),
              "every_step": ("every_step", {"bucket_mb": SMALL})}
MAX_NORM = 0.3
"""Below every gradient's norm in these windows, so that each update is clipped."""
MICRO_STEPS = 3
OVERFLOWS = 1
"""The window in which rank 1's loss overflows."""


def clip(model: nn.Module) -> None:
    clip_grad_norm(model.parameters(), MAX_NORM)


def clipped(strategy: str) -> tuple[dict[str, torch.Tensor], list[int], float]:
    """Parameters, the all-reduces between finish and the end of each update, and the norm that was stepped on."""
    name, options = STRATEGIES[strategy]
    model = wrap(name, make_model("equal", seed=dist.get_rank()), **options)
    optimizer = make_optimizer(model.parameters())
    late, norm = [], 0.0
    for window in windows("equal", dist.get_rank(), MICRO_STEPS):
        accumulate(model, window, squared_loss, "micro", every=isinstance(model, EveryStep))
        sent()
        clip(model)
        norm = float(global_norm(model.parameters()))
        optimizer.step()
        late.append(sent()[0])
        optimizer.zero_grad()
    return state(model.module), late, norm


def scaled(strategy: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Parameters, and the scale after each window; what rank 1 computes in one of them overflows."""
    name, options = STRATEGIES[strategy]
    model = wrap(name, make_model("equal", seed=dist.get_rank()), **options)
    optimizer = make_optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for k, window in enumerate(windows("equal", dist.get_rank(), MICRO_STEPS)):
        def loss_of(model, batch, k=k, first=window[0]):
            summed, count = squared_loss(model, batch)
            overflow = k == OVERFLOWS and dist.get_rank() == 1 and batch is first
            return scaler.scale(summed) * (float("inf") if overflow else 1), count

        accumulate(model, window, loss_of, "micro", every=isinstance(model, EveryStep))
        scaler.unscale_(optimizer)
        clip(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return state(model.module), scales


def everything() -> dict:
    torch.set_num_threads(1)
    out = {(job.__name__, strategy): job(strategy) for job in (clipped, scaled) for strategy in STRATEGIES}
    shard = nn.Parameter(torch.zeros(2))
    shard.grad = torch.tensor([3.0, float("inf") if dist.get_rank() == 1 else 4.0])
    out["overflow in one shard"] = float(clip_grad_norm([shard], 1.0, shards=dist.group.WORLD)), float(shard.grad[0])
    replicated, own = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    replicated.grad, own.grad = torch.tensor([1.0, 2.0]), torch.tensor([4.0 if dist.get_rank() else 2.0])
    out["both kinds"] = float(torch.hypot(global_norm([replicated]), global_norm([own], shards=dist.group.WORLD)))
    return out


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return run(everything, ranks=RANKS, fabric="loopback")


def expected(left_out: int | None = None) -> dict[str, torch.Tensor]:
    per_rank = [windows("equal", rank, MICRO_STEPS) for rank in range(RANKS)]
    kept = [window for k, window in enumerate(zip(*per_rank)) if k != left_out]
    return reference(lambda: make_model("equal"), kept, squared_loss, make_optimizer, "micro", clip)


def assert_close(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, tensor in want.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clipping_after_finish_holds_and_nothing_is_sent_again(strategy: str, results: list[dict]) -> None:
    """Horovod's double synchronize: a step that synchronises once more would undo the clipping, or clip each rank by a
    norm of its own."""
    want = expected()
    unclipped = reference(lambda: make_model("equal"), list(zip(*(windows("equal", r, MICRO_STEPS) for r in range(
        RANKS)))), squared_loss, make_optimizer, "micro")
    assert not torch.allclose(want["0.weight"], unclipped["0.weight"], atol=1e-3), "nothing was clipped"
    for found, late, norm in (rank["clipped", strategy] for rank in results):
        assert_close(found, want)
        assert late == [0] * len(late) and norm == pytest.approx(MAX_NORM, rel=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_overflow_on_one_rank_leaves_out_the_window_on_all(strategy: str, results: list[dict]) -> None:
    """The gradient is a mean over ranks before it is looked at, so no rank steps alone and none waits for another."""
    want = expected(left_out=OVERFLOWS)
    for found, scales in (rank["scaled", strategy] for rank in results):
        assert scales == [1024.0, 512.0, 512.0]
        assert_close(found, want)


def test_an_overflow_in_one_shard_is_seen_by_all(results: list[dict]) -> None:
    """Else one rank would leave out its step, and with it the collectives of the next one."""
    assert [rank["overflow in one shard"] for rank in results] == [(float("inf"), 3.0)] * RANKS


def test_replicated_parameters_count_once_beside_shards(results: list[dict]) -> None:
    assert [rank["both kinds"] for rank in results] == [pytest.approx(5.0)] * RANKS  # 1 + 4 + 4 + 16
