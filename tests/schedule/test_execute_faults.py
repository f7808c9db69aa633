"""What cannot run is refused before it does, and what fails on the way names rank, stage and shapes."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib import launch
from course_lib.launch import RankDied, RankFailed
from course_lib.schedule import Schedule, ScheduleError, add_gathers, add_steps, gpipe, one_f_one_b, zero_bubble
from course_lib.schedule.execute import Pipeline


def loss_of(output, batch):
    return output.square().sum()


def run_stages(make, rows=(3, 3, 3), p: int = 2) -> None:
    rank = dist.get_rank()
    pipeline = Pipeline(one_f_one_b(p, 3), {rank: make(rank)}, loss_of)
    pipeline.run([(torch.ones(n, 4),) for n in rows], 1)


def fails(make, *args, ranks: int = 2) -> str:
    start = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        launch.run(run_stages, make, *args, ranks=ranks, fabric="loopback", timeout_s=20)
    assert time.monotonic() - start < 15
    return str(failed.value)


def test_stages_that_do_not_chain_by_shape() -> None:
    text = fails(lambda rank: nn.Linear(4, 5) if rank == 0 else nn.Linear(4, 4))
    assert "stage 1 on rank 1, micro-batch 0: the stage failed on what stage 0 gives, (3, 5) float32" in text


def test_stages_that_do_not_chain_by_dtype() -> None:
    text = fails(lambda rank: nn.Linear(4, 4) if rank == 1 else Double())
    assert "stage 1 on rank 1, micro-batch 0: the stage failed on what stage 0 gives, (3, 4) float64" in text


class Double(nn.Module):
    def forward(self, x):
        return x.double()


class Pair(nn.Module):
    def forward(self, x):
        return x, x


def test_a_stage_gives_one_tensor() -> None:
    assert "stage 0 on rank 0, micro-batch 0: the stage put out a tuple" in fails(lambda rank: Pair())


def test_micro_batches_of_different_shapes() -> None:
    text = fails(lambda rank: nn.Linear(4, 4), (3, 3, 2))
    assert "stage 0 put out (2, 4) float32 for micro-batch 2, but (3, 4) float32 before; pad" in text


def test_too_few_micro_batches() -> None:
    assert "2 micro-batches, but the schedule takes 3" in fails(lambda rank: nn.Linear(4, 4), (3, 3))


class Dies(nn.Module):
    """In its second micro-batch, with messages under way in both directions."""

    seen = 0

    def forward(self, x):
        self.seen += 1
        if self.seen == 2:
            os._exit(7)
        return x * 1


def test_a_rank_that_dies_is_named_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(RankDied, match="rank 1 died without a result: exit code 7"):
        launch.run(run_stages, lambda rank: Dies() if rank == 1 else nn.Linear(4, 4), (3, 3, 3), 3, ranks=3,
                   fabric="loopback", timeout_s=30)
    assert time.monotonic() - start < 15


def refusals() -> list[str]:
    rank, texts = dist.get_rank(), []
    good, stage = one_f_one_b(2, 2), {dist.get_rank(): nn.Linear(4, 4)}
    deadlock = Schedule.parse("F0 send_F0 F1 send_F1 recv_B0 B0 recv_B1 B1\n"
                              "recv_F0 F0 B0 send_B0 recv_F1 F1 B1 send_B1")
    wrapped = {rank: nn.parallel.DistributedDataParallel(nn.Linear(4, 4))}
    both = [(0, "weight"), (1, "weight")]
    for schedule, stages, more in ((deadlock, stage, {}), (gpipe(3, 2), stage, {}), (good, {1 - rank: stage[rank]}, {}),
                                   (good, wrapped, {}), (good, stage, {"replicas": dist.group.WORLD}),
                                   (add_gathers(zero_bubble(2, 2)), stage, {}), (add_steps(good), stage, {}),
                                   (one_f_one_b(2, 2 + rank), stage, {}),
                                   (good, stage, {"ties": [both, [(rank, "w"), (rank, "x")]]}),
                                   (add_steps(good), stage, {"ties": [both]})):
        with pytest.raises(ScheduleError) as refused:
            Pipeline(schedule, stages, loss_of, **more)
        texts.append(str(refused.value))
    return texts


def test_refused_before_anything_runs() -> None:
    for texts in launch.run(refusals, ranks=2, fabric="loopback", timeout_s=30):
        expected = ["rank 0 stands at send_F1", "for 3 ranks, the group has 2", "was given stages",
                    "wrapped in DistributedDataParallel", "never reduces, so they would drift",
                    "without replicas they are whole", "give step=",
                    "rank 1 made another schedule than rank 0", "has no parameter 'w' to tie; it has weight, bias",
                    "leave add_gathers and add_steps out"]
        assert all(want in text for want, text in zip(expected, texts, strict=True)), texts


def after_a_failure() -> None:
    pipeline = Pipeline(one_f_one_b(1, 2), {0: nn.Linear(4, 4)}, loss_of)
    with pytest.raises(ScheduleError, match="failed on what the micro-batch gives"):
        pipeline.run([(torch.ones(2, 3),)] * 2, 1)
    with pytest.raises(RuntimeError, match="an earlier pass failed half-way"):
        pipeline.run([(torch.ones(2, 4),)] * 2, 1)


def test_a_pass_that_failed_is_not_followed_by_another() -> None:
    launch.run(after_a_failure, ranks=1, timeout_s=30)
