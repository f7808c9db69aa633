"""Cutting a parameter and putting it together, without any rank."""

from __future__ import annotations

import pytest
import torch

from course_lib.tensor import Shard


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("shape", "dim", "blocks"), [((12, 5), 0, 1), ((5, 12), 1, 1), ((36, 2), 0, 3), ((36,), 0, 3),
                                                      ((7, 3), 0, 1), ((3, 1), 0, 1), ((2, 3, 5), 2, 1)])
def test_parts_join_to_the_whole(shape: tuple, dim: int, blocks: int, ranks: int) -> None:
    whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    shard = Shard(dim, shape[dim], blocks)
    parts = [shard.part(whole, rank, ranks) for rank in range(ranks)]
    assert len({part.shape for part in parts}) == 1 and all(part.is_contiguous() for part in parts)
    assert torch.equal(shard.join(parts), whole)
    assert sum(part.sum() for part in parts) == whole.sum(), "what is padded is zero"
    assert all(part.data_ptr() != whole.data_ptr() for part in parts), "a part is a copy"


def test_each_block_is_cut() -> None:
    q, k, v = torch.zeros(4, 1), torch.ones(4, 1), torch.full((4, 1), 2.0)
    part = Shard(0, 12, blocks=3).part(torch.cat([q, k, v]), 1, 2)
    assert part.flatten().tolist() == [0, 0, 1, 1, 2, 2]
