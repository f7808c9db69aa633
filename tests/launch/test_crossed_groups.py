"""Two groups of the same ranks whose collectives are not in one order everywhere: an error shows the knot."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from course_lib.launch import RunTimeout, run


def crossed(other_way: bool) -> list[float]:
    """A collective on each of two groups; with `other_way` rank 1 begins with the second."""
    tensors = torch.ones(3), torch.full((3,), 2.0)
    pairs = list(zip(tensors, [dist.new_group([0, 1]) for _ in tensors]))
    if other_way and dist.get_rank() == 1:
        pairs.reverse()
    for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in pairs]:
        work.wait()
    return [float(tensor[0]) for tensor in tensors]


def test_one_order_on_all_ranks_goes_through() -> None:
    assert run(crossed, False, ranks=2, fabric="loopback") == [[2.0, 4.0]] * 2


def test_an_order_of_its_own_on_one_rank_names_both_with_the_group_that_each_stands_at() -> None:
    with pytest.raises(RunTimeout) as stuck:
        run(crossed, True, ranks=2, fabric="loopback", timeout_s=1.5)
    said = str(stuck.value)
    assert "rank 0 is still inside collective #1 (all_reduce, 12 bytes, group 1)" in said
    assert "rank 1 is still inside collective #1 (all_reduce, 12 bytes, group 2)" in said
