"""What `.grad` is after a window: views, their order, and numbers in any precision."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from course_lib.train.bucketed import Bucketed
from course_lib.train.ddp import wrap
from tests.train.cases import Odd, Tied, mlp
from tests.train.on_ranks import OURS, RANKS, SMALL, alone, backward, grads, inputs, model_of, same, sent, together

on_ranks, got = together()


@on_ranks
def views():
    out = {}
    for set_to_none in (True, False):
        for as_view in (True, False):
            model = Bucketed(model_of(), bucket_mb=SMALL, gradient_as_bucket_view=as_view)
            history, pointers = [], []
            for i in range(4):
                with model.no_sync():
                    backward(model, 10 * i)
                backward(model, i)
                model.finish_gradient_synchronization()
                history += grads(model)
                storages = {b.flat.untyped_storage().data_ptr() for b in model.reducer.buckets}
                inside = all(p.grad.untyped_storage().data_ptr() in storages for p in model.parameters())
                pointers.append((inside, [p.grad.data_ptr() for p in model.parameters()]))
                model.zero_grad(set_to_none=set_to_none)
            out[set_to_none, as_view] = history, pointers
    return out


def test_zero_grad_either_way_leaves_views_and_the_same_numbers(got) -> None:
    for rank in got(views):
        first = rank[True, True][0]
        for (_, as_view), (history, pointers) in rank.items():
            assert same(history, first, 0)
            assert all(inside == as_view for inside, _ in pointers)
            assert not as_view or pointers[1] == pointers[2] == pointers[3]


@on_ranks
def rebuild():
    out = {}
    model = Bucketed(model_of(Odd), bucket_mb=0.0002, first_bucket_mb=None)
    before = model.buckets
    backward(model)
    model.finish_gradient_synchronization()
    out["registration is not use"] = before, model.buckets, same(grads(model), alone(Odd, [0], "mean"))
    fixed = Bucketed(model_of(Odd), bucket_mb=0.0002, rebuild=False)
    backward(fixed)
    fixed.finish_gradient_synchronization()
    out["kept"] = fixed.buckets, [n for n, _, _ in fixed.ready_times()]
    odd = Bucketed(_TwoOrders(), bucket_mb=1e-5)
    for i in range(2):
        odd(inputs(i)).sum().backward()
        odd.finish_gradient_synchronization()
    out["ranks see different orders"] = odd.buckets, [n for n, _, _ in odd.ready_times()], grads(odd)
    return out


class _TwoOrders(nn.Module):
    """Rank 1 runs its layers the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = model_of(lambda: nn.Linear(6, 6)), model_of(lambda: nn.Linear(6, 6), 1)

    def forward(self, x):
        first, second = (self.a, self.b) if dist.get_rank() == 0 else (self.b, self.a)
        return second(torch.tanh(first(x)))


def test_the_order_is_rebuilt_from_what_rank_0_saw(got) -> None:
    rank0, rank1 = got(rebuild)
    before, after, right = rank0["registration is not use"]
    assert right and before != after
    assert before[0][0] == "middle.bias" and after[0][0] == "empty"
    assert [b for b in after if any(n.startswith("first.") for n in b)] == after[-1:]
    kept, ready = rank0["kept"]
    assert kept[0][0] == "middle.bias" and ready[0] == "empty"
    (buckets0, seen0, grads0), (buckets1, seen1, grads1) = (r["ranks see different orders"] for r in (rank0, rank1))
    assert buckets0 == buckets1 == [[name] for name in seen0] and seen1 != seen0
    assert same(grads0, grads1, 0)


@on_ranks
def plans():
    tied = Bucketed(model_of(Tied), plan=[["out.weight", "out.bias", "back.bias", "back.weight"],
                                          ["there.bias", "twice.weight", "twice.bias"]])
    backward(tied)
    sent()
    tied.finish_gradient_synchronization()
    backward(tied, 1)
    tied.finish_gradient_synchronization()
    return tied.buckets, sent()[0], tied.bucket_bytes


def test_a_plan_is_followed_and_never_rebuilt(got) -> None:
    for buckets, calls, sizes in got(plans):
        assert buckets == [["out.weight", "out.bias", "back.bias", "there.weight"],
                           ["there.bias", "twice.weight", "twice.bias"]]
        assert calls == 2 and sizes == [4 * (6 + 1 + 6 + 36), 4 * (6 + 36 + 6)]


@on_ranks
def half_precision_range():
    """Two gradients of 40000 overflow float16 when they are summed before they are divided."""
    out = {}
    for name, (strategy, options) in OURS.items():
        model = wrap(strategy, nn.Linear(1, 1, bias=False).half(), **options)
        model(torch.full((1, 1), 40000.0).half()).sum().backward()
        model.finish_gradient_synchronization()
        out[name] = float(model.module.weight.grad)
    return out


def test_division_comes_before_the_sum(got) -> None:
    for rank in got(half_precision_range):
        assert set(rank.values()) == {40000.0}, rank


@on_ranks
def detached_in_place():
    model = Bucketed(model_of(), bucket_mb=SMALL)
    for i in range(2):
        backward(model, i)
        model.finish_gradient_synchronization()
        for p in model.parameters():
            p.grad.detach_()
    return same(grads(model), alone(mlp, [0, 1], "mean"))


def test_gradients_in_buckets_may_be_detached_in_place(got) -> None:
    """DDP's may not."""
    assert got(detached_in_place) == [True] * RANKS
