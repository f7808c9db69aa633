"""Inside an update the host never waits for its GPU: CUDA itself refuses what would make it wait.

1-bit, top-k and PowerSGD are left out: before the next window they ask whether all numbers were finite. What a `float`
at the end of the training command's update waits for is left out too: the loss and the norm of a finished update.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course_lib.job import piped, replicas
from course_lib.job.batches import Batches
from course_lib.job.mesh import mesh
from course_lib.job.model import build
from course_lib.job.options import Options
from course_lib.launch import run
from course_lib.train import accumulate, data
from course_lib.train.clip import clip_grad_norm
from course_lib.train.gpt import GPT, GPTConfig, next_byte_loss
from tests.gpu.given import DEVICE, DRY, FABRIC, exact, moved, needs, on, only_on_gpus
from tests.gpu.test_strategies import EVERY, WAYS, wrapped
from tests.job.runs import options

pytestmark = pytest.mark.gpu
UPDATES, ROWS, LENGTH = 5, 2, 16


@contextmanager
def no_waiting(update: int):
    """In the last updates: in the first ones buckets are laid out anew, messages find their shapes, NCCL its rings."""
    checked = not DRY and update >= UPDATES - 2
    torch.cuda.set_sync_debug_mode("error") if checked else None
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default") if checked else None


@only_on_gpus
def test_this_would_be_noticed() -> None:
    there = torch.ones(3, device=DEVICE)
    with pytest.raises(RuntimeError, match="synchroni"), no_waiting(UPDATES):
        there.sum().item()
    assert there.sum().item() == 3


def updates(name: str) -> float:
    """How far a parameter went in the last update."""
    exact()
    torch.manual_seed(0)
    strategy, given = WAYS[name]
    model, optimizer = wrapped(name, GPT(GPTConfig(length=LENGTH, layers=2, heads=2, width=16)).to(DEVICE))
    source = data.batches(data.text(0.1), ROWS, LENGTH, 2 * UPDATES, rank=dist.get_rank())
    held = optimizer.param_groups[0]["params"][0]
    for update in range(UPDATES):
        window = moved([next(source) for _ in range(2)])
        before = held.detach().clone()
        with no_waiting(update):
            accumulate(model, window, lambda m, b: (next_byte_loss(m, b)[0], b[1].numel()),
                       counts=[ROWS * LENGTH] * 2, op=given.get("op", "mean"), every=strategy in EVERY)
            if not getattr(model, "steps_itself", False):
                model.clip_grad_norm(0.5) if strategy.startswith("zero") else clip_grad_norm(model.parameters(), 0.5)
                optimizer.step()
            optimizer.zero_grad()
    return float((held.detach() - before).abs().sum())


@pytest.mark.parametrize("ranks", on(1, 2, 8))
@pytest.mark.parametrize("name", WAYS)
def test_nothing_waits_under_any_strategy(name: str, ranks: int) -> None:
    assert max(run(updates, name, ranks=ranks, fabric=FABRIC)) > 0


def of_the_command(asked: Options) -> list[float]:
    """The norm of every update."""
    exact()
    replicas.float = piped.float = lambda number: number
    asked, device = asked.laid_out(dist.get_world_size()), torch.device(DEVICE)
    grid = mesh(asked)
    model, batches = build(asked, grid, device), Batches(asked, device)
    trainee = (piped.Piped if asked.pp > 1 else replicas.Replicas)(asked, grid, model)
    norms = []
    for update in range(UPDATES):
        window = batches.window(update, grid.replica)
        with no_waiting(update):
            norms.append(trainee.update(window).norm)
    return [norm.item() for norm in norms]


COMMAND = [(1, {"strategy": "bucketed"}), (1, {"strategy": "zero3"}),
           *((2, {"compress": scheme}) for scheme in ("fp16", "bf16")), (2, {"strategy": "diloco", "local_steps": 2}),
           (2, {"optimizer": "adamw", "strategy": "zero2", "bf16": True}),
           (2, {"tp": 2}), (2, {"tp": 2, "sequence_parallel": True}), (2, {"pp": 2}), (2, {"pp": 2, "untied": True}),
           *((2, {"pp": 2, "layers": 4, "pipeline": name}) for name in ("gpipe", "interleaved", "zero-bubble", "zb-v")),
           (4, {"pp": 2}), (4, {"pp": 2, "tp": 2}), (8, {"pp": 2, "tp": 2}), (8, {"pp": 4, "layers": 4})]


@pytest.mark.parametrize(("ranks", "how"), [pytest.param(ranks, how, marks=needs(ranks), id=f"{ranks}: {how}")
                                            for ranks, how in COMMAND])
def test_nothing_waits_in_an_update_of_the_training_command(ranks: int, how: dict, tmp_path: Path) -> None:
    for norms in run(of_the_command, options(tmp_path, **how), ranks=ranks, fabric=FABRIC):
        assert len(norms) == UPDATES and all(0 < norm < 100 for norm in norms)
