"""Inside an update the host asks the device for no number: on a GPU it would wait, and launch what comes next late."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from course_lib.job.batches import Batches
from course_lib.job.mesh import mesh
from course_lib.job.model import build
from course_lib.job.options import Options
from course_lib.job.replicas import Replicas
from course_lib.launch import run
from course_lib.schedule.replicas import Replicas as Reduced
from tests.job.runs import options

CPU = torch.device("cpu")


class NoWaiting(TorchFunctionMode):
    """Refuses to read a number from a tensor and to make a tensor of numbers, which is copied to its device."""

    waits = (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__int__,
             torch.Tensor.__float__, torch.Tensor.nonzero, torch.Tensor.numpy, torch.Tensor.cpu, torch.tensor)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in self.waits, f"{func.__name__} makes the host wait"
        return func(*args, **(kwargs or {}))


def one_update(asked: Options) -> list[float]:
    """The norm of the gradient, and those after clipping to half of it and with one that is not finite."""
    asked = asked.laid_out(1)
    grid = mesh(asked)
    trainee = Replicas(asked, grid, build(asked, grid, CPU))
    batch = Batches(asked, CPU).window(0, 0)[0]
    with NoWaiting():
        loss, count = trainee._loss_of(trainee.model, batch)
        (loss / count).backward()
    trainee.model.finish_gradient_synchronization()
    norms = [trainee._norm()]
    trainee.options = replace(asked, max_norm=float(norms[0]) / 2)
    for norm in (norms[0], norms[0] / 4, torch.full((), torch.inf)):
        with NoWaiting():
            trainee.clip(norm)
        norms.append(trainee._norm())
    return list(map(float, norms))


@pytest.mark.parametrize("strategy", ["bucketed", "zero2"])
def test_a_micro_step_and_clipping_wait_for_nothing(tmp_path: Path, strategy: str) -> None:
    (norms,) = run(one_update, options(tmp_path, strategy=strategy), ranks=1, fabric="loopback")
    assert norms == pytest.approx([norms[0], norms[0] / 2, norms[0] / 2, norms[0] / 2]) and norms[0] > 0.1


def two_buckets() -> list[list[float]]:
    stage = nn.Linear(3, 2)
    over = Reduced({0: stage}, {0: 2}, dist.group.WORLD)
    for p in stage.parameters():
        p.grad = torch.ones_like(p)
    with NoWaiting():
        over.start(0, 0)
        over.start(0, 1)
        over.finish([(0, 0), (0, 1)])
    return [p.grad.flatten().tolist() for p in stage.parameters()]


def test_reductions_of_a_stage_wait_for_nothing() -> None:
    assert run(two_buckets, ranks=2, fabric="loopback") == [[[2.0] * 6, [2.0] * 2]] * 2
