"""Stages that put out complex numbers or put a sign off, change what they are given, or compute themselves again."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib.launch import run
from course_lib.schedule import ScheduleError, interleaved, one_f_one_b, zero_bubble
from course_lib.schedule.execute import Pipeline
from course_lib.schedule.split import backward_input
from tests.schedule.pipes import gradients

MICRO = 3
SCHEDULES = {"1f1b": one_f_one_b, "zero bubble": zero_bubble}


class Turned(nn.Module):
    """Complex numbers, whose conjugation torch puts off: what lies in memory is not what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(self.turn.dtype) @ self.turn).conj()


class Negated(Turned):
    """Real numbers, whose sign torch puts off."""

    def forward(self, x):
        return super().forward(x).imag


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=True)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x.relu_())


def pair(kind) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4) if kind is Again else kind(), kind()]  # the first stage's input needs no gradient


def loss_of(output, batch):
    return (output.abs() - batch[1]).square().sum()


def window() -> list:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator)) for _ in range(MICRO)]


def gradients_of(make, kind) -> list:
    rank = dist.get_rank()
    pipeline = Pipeline(make(2, MICRO), {rank: pair(kind)[rank]}, loss_of)
    pipeline.run(window(), MICRO)
    return gradients(pipeline.stages[rank])


def everything() -> dict:
    found = {(name, kind.__name__): gradients_of(make, kind)
             for name, make in SCHEDULES.items() for kind in (Turned, Negated)}
    return found | {("1f1b", "Again"): gradients_of(one_f_one_b, Again)}


def test_what_goes_from_stage_to_stage_is_what_is_read() -> None:
    for rank, found in enumerate(run(everything, ranks=2, fabric="loopback", timeout_s=60)):
        for (name, kind), grads in found.items():
            stages = pair(globals()[kind])
            sum(loss_of(nn.Sequential(*stages)(batch[0]), batch) for batch in window()
                ).div(MICRO).backward()
            for mine, want in zip(grads, gradients(stages[rank]), strict=True):
                torch.testing.assert_close(mine, want, msg=f"{name} {kind}")


def test_a_reentrant_checkpoint_is_refused_where_backward_is_split() -> None:
    for x in (torch.randn(2, 4, requires_grad=True), torch.randn(2, 4)):
        stage = nn.Sequential(nn.Linear(4, 4), Again())
        with pytest.raises(ScheduleError, match="use use_reentrant=False, or a schedule whose backward is whole"):
            backward_input(stage(x).sum(), None, x, list(stage.parameters()))


def in_place() -> None:
    for make in (interleaved, zero_bubble):
        pipeline = Pipeline(make(1, MICRO, 2), {0: nn.Linear(4, 4), 1: InPlace()}, loss_of)
        with pytest.raises(ScheduleError, match=r"stage 1 on rank 0, micro-batch 0: the stage .* in-place operation"):
            pipeline.run(window(), MICRO)


def test_a_stage_that_changes_what_it_is_given_is_refused() -> None:
    run(in_place, ranks=1, timeout_s=30)
