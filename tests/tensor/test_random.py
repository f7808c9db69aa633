"""Random numbers of a tensor-parallel group: alike where activations are, apart where they are shards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib.launch import RankFailed, run
from course_lib.tensor import ShardedDropout, refuse_different_random, sharded_random


def draws() -> dict:
    torch.set_num_threads(1)
    ones = torch.ones(400)
    torch.manual_seed(5)
    refuse_different_random(None)
    common, own = nn.Dropout(0.5), ShardedDropout(0.5, None)
    out = {"common": common(ones), "own": own(ones), "own again": own(ones), "common after": common(ones)}
    refuse_different_random(None)
    torch.manual_seed(5)
    out["repeated"] = torch.equal(common(ones), out["common"]) and torch.equal(own(ones), out["own"])
    try:
        with sharded_random(None):
            torch.rand(3 + dist.get_rank())
            raise KeyError
    except KeyError:
        refuse_different_random(None)
    own.eval()
    out["eval"] = torch.equal(own(ones), ones)
    x = ones.clone().requires_grad_()
    own.train()
    y = checkpoint(lambda x: own(common(x)).square(), x, use_reentrant=False)
    y.sum().backward()
    out["recomputed"] = torch.equal(x.grad, 2 * y.detach())  # y = (m x)² with x = 1, so dy/dx = 2 m²
    refuse_different_random(None)
    return out


def test_masks_alike_and_apart_and_restored_by_recomputation() -> None:
    first, second = run(draws, ranks=2, fabric="loopback")
    for name in ("common", "common after"):
        assert torch.equal(first[name], second[name])
    masks = [first["common"], first["common after"], *(rank[name] for rank in (first, second)
                                                       for name in ("own", "own again"))]
    for i, mask in enumerate(masks):
        assert set(mask.unique().tolist()) == {0.0, 2.0} and 0.35 < (mask == 0).double().mean() < 0.65
        for other in masks[i + 1:]:
            assert 0.35 < (mask == other).double().mean() < 0.65
    for rank in (first, second):
        assert rank["repeated"] and rank["eval"] and rank["recomputed"]


def test_ranks_seeded_apart_are_named() -> None:
    def body() -> None:
        torch.manual_seed(7 if dist.get_rank() else 8)
        refuse_different_random(None)

    with pytest.raises(RankFailed, match="random state of rank 1 is not that of rank 0"):
        run(body, ranks=2, fabric="loopback")


def test_a_probability_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="give a probability"):
        ShardedDropout(1.5, None)
