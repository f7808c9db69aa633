"""What a window does to a sharded model: passes in another order, weights of several units, sums in half precision,
and how often a gradient travels."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.plan.volumes import shuffle_bytes
from course_lib.train import Sharded
from tests.train.cases import mlp
from tests.train.on_ranks import RANKS, backward, inputs, model_of, same, together

STAGES = (1, 2, 3)
on_ranks, got = together(timeout_s=60)


def whole(model: Sharded) -> list[torch.Tensor]:
    with model.gathered():
        return [p.detach().clone() for p in model.module.parameters()]


def sgd(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


class Reordered(nn.Module):
    """Its layers run in the order of the call; the first and the last are one weight, which two units share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)]), nn.Linear(6, 1)
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x, order):
        for i in order:
            x = torch.tanh(self.layers[i](x))
        return self.out(x)


ORDERS = ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2), (2, 2, 0, 3, 1, 2))


@on_ranks
def orders():
    out = {}
    for stage, prefetch in itertools.product(STAGES, (0, 1, 3)):
        model, want = Sharded(model_of(Reordered), stage, prefetch=prefetch), model_of(Reordered)
        optimizers = sgd(model.shards()), sgd(want.parameters())
        for window in range(3):  # two passes each, of another order than those of the window before
            for i in (window, window + 1):
                model(inputs(i), ORDERS[i]).square().sum().backward()
                for rank in range(RANKS):
                    (want(inputs(i, rank), ORDERS[i]).square().sum() / RANKS).backward()
            model.finish_gradient_synchronization()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            out[stage, prefetch, window] = same(whole(model), list(want.parameters()))
    return out


def test_units_in_another_order_in_each_pass_and_a_weight_that_two_of_them_share(got) -> None:
    for rank in got(orders):
        assert len(rank) == 27 and not [case for case, right in rank.items() if not right]


LAYOUTS = (None, 0), (None, 1), (None, 9), ([], 1), (["0", "2"], 1)
"""Units and prefetch."""


@on_ranks
def units_and_depth():
    out = {}
    for stage, (units, prefetch) in itertools.product(STAGES, LAYOUTS):
        model = Sharded(model_of(), stage, units, prefetch)
        optimizer = torch.optim.AdamW(model.shards(), lr=0.02, foreach=False)
        for window in range(2):
            for i in range(2):
                backward(model, 2 * window + i)
            model.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad()
        out[stage, str(units), prefetch] = whole(model)
    return out


def test_units_prefetch_and_stage_change_no_bit(got) -> None:
    """What is gathered and reduced together, and when, is no part of the mathematics. (Two ranks: a sum of two is the
    same in either order.)"""
    for rank in got(units_and_depth):
        first = next(iter(rank.values()))
        assert len(rank) == len(STAGES) * len(LAYOUTS)
        assert not [case for case, found in rank.items() if not all(map(torch.equal, found, first))]


@on_ranks
def one_backward_of_two_forwards():
    out = {}
    for stage in STAGES:
        model, want = Sharded(model_of(), stage), model_of()
        optimizers = sgd(model.shards()), sgd(want.parameters())
        for _ in range(2):
            (model(inputs(0)).square().sum() + model(inputs(1)).square().sum()).backward()
            model.finish_gradient_synchronization()
            for i, rank in itertools.product(range(2), range(RANKS)):
                (want(inputs(i, rank)).square().sum() / RANKS).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        out[stage] = same(whole(model), list(want.parameters()))
    return out


def test_two_forwards_and_one_backward(got) -> None:
    assert got(one_backward_of_two_forwards) == [dict.fromkeys(STAGES, True)] * RANKS


@on_ranks
def a_large_gradient_and_small_ones():
    """The gradient after a window of 256, 1, 1, … in bfloat16: on the rank that has it."""
    out = {}
    for stage, silent in itertools.product(STAGES, (False, True)):
        model = Sharded(nn.Linear(1, 1, bias=False, dtype=torch.bfloat16), stage, whole_gradients=silent)
        for i in range(9):
            with model.no_sync() if silent and i < 8 else nullcontext():
                loss = model(torch.full((1, 1), 1.0 if i else 256.0, dtype=torch.bfloat16)).sum()
            loss.backward()
        model.finish_gradient_synchronization()
        out[stage, silent] = [float(piece.grad) for piece in model.shards() if piece.numel()]
    return out


def test_a_window_of_bfloat16_is_summed_in_float32(got) -> None:
    """In bfloat16, 256 + 1 is 256."""
    first, second = got(a_large_gradient_and_small_ones)
    for case in first:
        assert first[case] + second[case] == [264.0], case


@on_ranks
def bytes_of_a_window():
    out = {}
    for stage in STAGES:
        for silent in (False, True):
            model = Sharded(model_of(), stage, whole_gradients=silent)
            traffic = dist.group.WORLD.traffic
            traffic.reset()
            for i in range(4):
                with model.no_sync() if silent and i < 3 else nullcontext():
                    backward(model, i)
            model.finish_gradient_synchronization()
            out[stage, silent] = traffic.total_bytes
    return out


def test_under_no_sync_a_gradient_travels_once(got) -> None:
    once = shuffle_bytes(4 * sum(p.numel() for p in mlp().parameters()), RANKS)
    for rank in got(bytes_of_a_window):
        for stage in STAGES:
            assert rank[stage, False] - rank[stage, True] == pytest.approx(3 * once, rel=0.02), stage


@on_ranks
def no_sync_refused():
    out = {}
    for stage in STAGES:
        model = Sharded(model_of(), stage)
        try:
            with model.no_sync():
                backward(model)
            out[stage] = ""
        except RuntimeError as error:
            out[stage] = str(error)
    return out


def test_no_sync_is_refused_in_the_stages_that_spread_the_gradient(got) -> None:
    for rank in got(no_sync_refused):
        assert rank[1] == "" and all(f"no_sync() in ZeRO stage {stage} would keep the whole gradient" in rank[stage]
                                     for stage in (2, 3))
