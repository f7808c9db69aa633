"""What stock DDP does with buckets, no_sync and parameters that get no gradient: the figures that the course states
and compares itself with."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from course_lib.train import Bucketed, NoSync, SerialAllReduce, StockDDP
from tests.train.cases import Branches, mlp
from tests.train.on_ranks import RANKS, alone, backward, grads, inputs, model_of, same, sent, together

on_ranks, got = together()
MB = 2**20


def twelve() -> nn.Module:
    """3 MB of gradients: a weight of 0.25 MB and a bias of 1 KB a layer."""
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))


LAYOUTS = {"default": {}, "the default written out": {"bucket_mb": 25, "first_bucket_mb": None},
           "one MB": {"bucket_mb": 1, "first_bucket_mb": None}, "find_unused": {"find_unused": True}}


@on_ranks
def bucket_sizes():
    out = {}
    for name, options in LAYOUTS.items():
        def spy(state, bucket):
            state[-1].append(round(bucket.buffer().numel() * 4 / MB, 1))
            return default_hooks.allreduce_hook(None, bucket)

        sizes: list[list[float]] = []
        model = StockDDP(twelve(), comm_hook=spy, hook_state=sizes, **options)
        for _ in range(3):
            sizes.append([])
            model(torch.ones(2, 256)).sum().backward()
        ours = Bucketed(twelve(), **options)
        ours(torch.ones(2, 256)).sum().backward()
        ours.finish_gradient_synchronization()
        out[name] = sizes, [round(size / MB, 1) for size in ours.bucket_bytes]
    return out


def test_bucket_sizes_in_the_first_iteration_and_after_it(got) -> None:
    """Without a cap the first iteration is one bucket and a small first bucket comes later; a cap that is
    written out has no small bucket; with find_unused it comes at once, is reduced last, and stays there."""
    for rank in got(bucket_sizes):
        assert rank["default"] == ([[3.0], [1.0, 2.0], [1.0, 2.0]], [1.0, 2.0])
        assert rank["the default written out"] == ([[3.0]] * 3, [3.0])
        assert rank["one MB"][0][1:] == [[1.0, 1.0, 1.0]] * 2 and rank["one MB"][1] == [1.0, 1.0, 1.0]
        assert rank["find_unused"][0] == [[2.0, 1.0]] * 3


@on_ranks
def four_micro_steps():
    out = {}
    for name, make in {"ddp": StockDDP, "bucketed": Bucketed, "serial": lambda m: SerialAllReduce(m, flat=True),
                       "no_sync": NoSync}.items():
        for around in ("nothing", "backward", "forward", "both"):
            model = make(model_of())
            sent()
            for i in range(4):
                silent = i < 3 and around
                with model.no_sync() if silent in ("forward", "both") else nullcontext():
                    loss = model(inputs(i)).square().sum()
                with model.no_sync() if silent in ("backward", "both") else nullcontext():
                    loss.backward()
            model.finish_gradient_synchronization()
            out[name, around] = sent()[0], same(grads(model), alone(mlp, [0, 1, 2, 3], "mean"))
    return out


def test_no_sync_around_backward_alone_saves_nothing(got) -> None:
    """It is 4 all-reduces instead of 1, and the gradient is right all the same, so only a count
    shows it. `NoSync` sends in finish, so it sends once whatever is marked."""
    for rank in got(four_micro_steps):
        for (name, around), (calls, right) in rank.items():
            every = around in ("nothing", "backward") and name != "no_sync"
            assert (calls, right) == (4 if every else 1, True), (name, around)


def error_of(action) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return ""


def equal_on_all_ranks(tensors: list[torch.Tensor | None]) -> bool:
    mine = torch.cat([t.flatten() for t in tensors if t is not None])
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    return all(torch.equal(t, mine) for t in theirs)


@on_ranks
def silent_faults():
    out = {}
    model = StockDDP(model_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        backward(model)
    optimizer.step()
    out["stepped after no_sync alone"] = equal_on_all_ranks([p.detach() for p in model.parameters()])
    model = StockDDP(model_of(Branches))
    model(torch.ones(4, 6) * (1 + dist.get_rank())).sum().backward()
    out["unused"] = equal_on_all_ranks(grads(model))
    out["said"] = error_of(lambda: model(torch.ones(4, 6)))
    model = StockDDP(model_of())
    backward(model)
    out["detached"] = error_of(lambda: next(model.parameters()).grad.detach_())
    return out


def test_what_stock_ddp_does_in_silence(got) -> None:
    """What our strategies say instead is in test_faults and test_misuse."""
    for rank in got(silent_faults):
        assert not rank["stepped after no_sync alone"] and not rank["unused"], "the replicas did not part"
        assert "expected to have finished reduction" in rank["said"].lower()
        assert "detach" in rank["detached"].lower()


@on_ranks
def used_under_no_sync_only():
    model, want = StockDDP(model_of(Branches), find_unused=True), model_of(Branches)
    signs = (1.0, -1.0)
    with model.no_sync():
        model(torch.full((4, 6), signs[dist.get_rank()])).sum().backward()
    model(torch.full((4, 6), -1.0)).sum().backward()
    for x in (*signs, -1.0, -1.0):
        (want(torch.full((4, 6), x)).sum() / RANKS).backward()
    return same(grads(model)[2:], grads(want)[2:])


def test_a_parameter_used_under_no_sync_only_is_reduced(got) -> None:
    """Ours: test_windows. (`never`, the first two parameters, is zeros in DDP and None in ours.)"""
    assert got(used_under_no_sync_only) == [True] * RANKS
