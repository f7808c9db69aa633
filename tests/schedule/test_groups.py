"""Groups that a pipeline of three ranks makes for itself. torch names those of some ranks by how many groups each of
them has: where that differs, they wait for each other for ever."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from course_lib import launch
from course_lib.schedule import one_f_one_b, with_messages
from course_lib.schedule.execute import Pipeline
from course_lib.schedule.mail import _ways


def ways_as_over_nccl() -> dict[tuple[int, int], str]:
    """Each direction has a group of its own and has carried its first message."""
    found = _ways(with_messages(one_f_one_b(3, 4)), dist.get_rank(), dist.group.WORLD, [0, 1, 2], torch.device("cpu"))
    return {pair: group.group_name for pair, group in found.items()}


def test_every_direction_between_three_ranks_has_its_group() -> None:
    found = launch.run(ways_as_over_nccl, ranks=3, fabric="loopback", timeout_s=30)
    assert [sorted(one) for one in found] == [[(0, 1), (1, 0)], [(0, 1), (1, 0), (1, 2), (2, 1)], [(1, 2), (2, 1)]]
    for ways in found:
        assert all(ways[a, b] != ways[b, a] for a, b in ways)
    assert found[0][0, 1] == found[1][0, 1] and found[1][2, 1] == found[2][2, 1]


def tied_and_then_another() -> float:
    """The two ranks of the second pipeline hold the tied weight and do not."""
    rank = dist.get_rank()
    Pipeline(one_f_one_b(3, 2), {rank: nn.Linear(4, 4)}, lambda out, _: out.sum(),
             ties=[[(0, "weight"), (2, "weight")]])
    pair = dist.new_group([0, 1])
    if rank == 2:
        return 0.0
    pipeline = Pipeline(one_f_one_b(2, 2), {rank: nn.Linear(4, 4)}, lambda out, _: 0 * out.sum() + 1, group=pair)
    return pipeline.run([(torch.ones(1, 4),)] * 2, 1)


def test_a_second_pipeline_starts_after_one_whose_ends_share_a_weight() -> None:
    assert launch.run(tied_and_then_another, ranks=3, fabric="loopback", timeout_s=30) == [0.0, 2.0, 0.0]
