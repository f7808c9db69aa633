"""Means over ranks that gloo computes itself, and one kind of sum that it does not know."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from course_lib.launch import run
from course_lib.launch.renamed import reduce_scatter_single

RANKS = 3


def means() -> dict:
    rank, out = dist.get_rank(), {}
    whole = torch.arange(2.0 * RANKS) + rank
    dist.all_reduce(whole, op=dist.ReduceOp.AVG)
    out["all_reduce"] = whole.tolist()
    part = torch.zeros(2)
    reduce_scatter_single(part, torch.arange(2.0 * RANKS) + rank, op=dist.ReduceOp.AVG)
    out["reduce_scatter"] = part.tolist()
    dist.reduce_scatter(part, [torch.full((2,), float(i + rank)) for i in range(RANKS)], op=dist.ReduceOp.AVG)
    out["reduce_scatter of a list"] = part.tolist()
    scaled = torch.ones(3)
    try:
        dist.all_reduce(scaled, op=dist._make_nccl_premul_sum(0.5))
        out["premultiplied"] = ""
    except (RuntimeError, ValueError) as error:
        out["premultiplied"] = str(error)
    return out


@pytest.mark.parametrize("fabric", ["loopback", "paced"])
def test_a_mean_is_divided_and_what_gloo_does_not_know_is_an_error(fabric: str) -> None:
    """FSDP asks for means: one that comes back as a sum trains at a rate that is wrong by the number of ranks."""
    for rank, found in enumerate(run(means, ranks=RANKS, fabric=fabric)):
        assert found["all_reduce"] == [i + 1.0 for i in range(2 * RANKS)]
        assert found["reduce_scatter"] == [2 * rank + 1.0, 2 * rank + 2.0]
        assert found["reduce_scatter of a list"] == [rank + 1.0] * 2
        assert found["premultiplied"]
