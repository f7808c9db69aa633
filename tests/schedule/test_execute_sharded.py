"""Pipelines of sharded stages: parameters whole only while they are gathered, one reduce-scatter a bucket."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib import launch
from course_lib.schedule import (
    Op,
    ScheduleError,
    add_gathers,
    add_messages,
    add_reductions,
    add_steps,
    early_receives,
    move_earlier,
    zb_v,
)
from course_lib.schedule.execute import Pipeline
from tests.schedule.pipes import KINDS, MAKERS, split

LR, M = 0.1, 3


def schedule_of(name: str, p: int, at_once: int):
    made = add_reductions(add_gathers(MAKERS[name](p, M), at_once), 2)
    return early_receives(add_messages(add_steps(move_earlier(made, Op.GATHER, by=1, cap=2))))


def two_updates(name: str, kind: str, at_once: int):
    """Two pipelines of two ranks, two updates of two passes each. (parameters by stage, collectives, bytes left)"""
    make, batch, loss_of, count = KINDS[kind]
    rank, p = dist.get_rank() % 2, 2
    pipes, across = ([dist.new_group(r) for r in groups] for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    schedule = schedule_of(name, p, at_once)
    every = make(schedule.stages)
    if dist.get_rank() >= 2:
        with torch.no_grad():
            for module in every:
                for param in module.parameters():
                    param.zero_()  # the first replica's values count
    mine = {s: every[s] for s in schedule.stages_of(rank)}
    optimizers = {}

    def step(stage: int) -> None:
        optimizers[stage].step()
        optimizers[stage].zero_grad()

    pipeline = Pipeline(schedule, mine, loss_of, group=pipes[dist.get_rank() // 2], replicas=across[rank], step=step)
    for s in mine:
        optimizers[s] = torch.optim.SGD(pipeline.parameters(s), LR)
    for update in range(2):
        windows = [[batch(i + 12 * update) for i in part] for part in split(range(12), M)]
        total = sum(count(b) for w in windows for b in w)
        own = windows[2 * (dist.get_rank() // 2):][:2]
        for k, window in enumerate(own):
            pipeline.run(window, total, last=k == 1)
    calls = dict(across[rank].traffic.calls)
    left = sum(p.numel() for s in mine for p in mine[s].parameters() if p.requires_grad)
    with pipeline.gathered():
        out = {s: [p.detach().clone() for p in mine[s].parameters()] for s in mine}
    return out, calls, left, sum(a.op is Op.GATHER for a in schedule.ranks[rank])


@pytest.mark.parametrize(("name", "kind", "at_once"), [
    pytest.param("interleaved", "mlp", 1, marks=pytest.mark.slow), ("zero bubble 2", "gpt", 2), ("zb-v", "mlp", 1)])
def test_two_updates_are_those_of_one_process(name: str, kind: str, at_once: int) -> None:
    make, batch, loss_of, count = KINDS[kind]
    stages = make(4)
    params = [p for s in stages for p in s.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, LR)
    for update in range(2):
        window = [batch(i + 12 * update) for i in range(12)]
        (sum(loss_of(nn.Sequential(*stages)(b[0]), b) for b in window) / sum(map(count, window))).backward()
        optimizer.step()
        optimizer.zero_grad()
    for of_stages, calls, left, gathers in launch.run(two_updates, name, kind, at_once, ranks=4, fabric="loopback",
                                                      timeout_s=60):
        for s, found in of_stages.items():
            torch.testing.assert_close(found, [p.detach() for p in stages[s].parameters()], rtol=1e-4, atol=1e-6)
        assert left == 0, "nothing stays whole between passes"
        assert calls["reduce_scatter"] == 2 * 2 * 2, "two updates, two stages, two buckets"
        assert calls["all_gather"] == 4 * 2 * gathers, "four passes, two buckets"


def shared() -> None:
    layer = nn.Linear(4, 4)
    alone = [dist.new_group([r]) for r in range(2)][dist.get_rank()]
    with pytest.raises(ScheduleError, match="stages 0 and 1 share a parameter") as refused:
        Pipeline(add_reductions(add_gathers(zb_v(1, 2))), {0: layer, 1: nn.Sequential(layer)},
                 lambda out, _: out.sum(), group=alone, replicas=dist.group.WORLD)
    assert "leave their rank unsharded" in str(refused.value)


def test_a_shared_parameter_cannot_be_gathered_for_one_stage_alone() -> None:
    launch.run(shared, ranks=2, fabric="loopback", timeout_s=30)
