"""Strategies over a part of the ranks, and buffers at the start."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from course_lib.launch import run
from course_lib.train.bucketed import Bucketed
from course_lib.train.control import SynchronizationError
from course_lib.train.ddp import wrap
from tests.train.cases import make_model, make_optimizer, state
from tests.train.on_ranks import inputs

PAIRS = ([0, 1], [2, 3])


class WithBuffers(nn.Module):
    """Buffers of several dtypes, a non-contiguous parameter and a scalar."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.BatchNorm1d(3)
        self.norm(torch.randn(4, 3))
        self.register_buffer("flags", torch.rand(5) > 0.5)
        self.register_buffer("small", torch.randn(3).bfloat16())
        self.turned = nn.Parameter(torch.randn(3, 2).t())
        self.frozen = nn.Parameter(torch.randn(()), requires_grad=False)


def pairs() -> dict:
    torch.set_num_threads(1)
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in PAIRS]
    group = groups[rank // 2]
    out = {}
    for name in ("serial", "no_sync", "bucketed", "ddp"):
        model = wrap(name, make_model("equal", seed=rank), process_group=group)
        optimizer = make_optimizer(model.parameters())
        for i in range(2):
            model(inputs(i)).square().mean().backward()
            model.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad()
        out[name] = state(model.module)
    module = WithBuffers(seed=rank)
    Bucketed(module, find_unused=True, process_group=group)
    out["start"] = state(module)
    model = Bucketed(make_model("equal"), process_group=group)
    try:
        loss = model(inputs()).sum()
        if rank != 3:
            loss.backward()
        model.finish_gradient_synchronization()
        out["said"] = ""
    except SynchronizationError as error:
        out["said"] = str(error)
    return out


def test_each_group_trains_on_its_own() -> None:
    found = run(pairs, ranks=4, fabric="loopback")
    for ranks in PAIRS:
        first, second = (found[r] for r in ranks)
        for name in ("serial", "no_sync", "bucketed"):
            for parameter, tensor in first[name].items():
                assert torch.equal(tensor, second[name][parameter])
                torch.testing.assert_close(tensor, first["ddp"][parameter], rtol=1e-5, atol=1e-6)
        want = state(WithBuffers(seed=ranks[0]))
        for got in (first["start"], second["start"]):
            assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    assert not torch.equal(found[0]["bucketed"]["0.weight"], found[2]["bucketed"]["0.weight"])
    assert found[0]["said"] == found[1]["said"] == ""
    assert "rank 3 skipped a backward pass" in found[2]["said"] and found[2]["said"] == found[3]["said"]
