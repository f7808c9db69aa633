"""A weight that two pipeline ranks share is summed whole: a schedule that would cut it first is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib import launch
from course_lib.schedule import ScheduleError, add_gathers, add_reductions, add_steps, one_f_one_b
from course_lib.schedule.execute import Pipeline


def refused() -> list[str]:
    rank = dist.get_rank()
    pipes, across = ([dist.new_group(r) for r in groups] for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    said = []
    for schedule in (add_reductions(add_gathers(one_f_one_b(2, 2))), add_steps(add_reductions(one_f_one_b(2, 2)))):
        with pytest.raises(ScheduleError) as error:
            Pipeline(schedule, {rank % 2: nn.Linear(4, 4)}, lambda out, _: out.sum(), group=pipes[rank // 2],
                     replicas=across[rank % 2], step=lambda stage: None, ties=[[(0, "weight"), (1, "weight")]])
        said.append(str(error.value))
    return said


def test_ties_are_refused_where_gradients_are_cut_or_stepped_inside_the_pass() -> None:
    """Each rank would add up parts of the weight that do not belong together, or step before the sum is there."""
    torch.set_num_threads(1)
    for said in launch.run(refused, ranks=4, fabric="loopback", timeout_s=30):
        assert all("leave add_gathers and add_steps out" in words for words in said) and len(said) == 2
