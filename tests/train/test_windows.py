"""What a window is: which backward is sent, how often, and how many bytes."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from course_lib.train.bucketed import Bucketed
from course_lib.train.ddp import wrap
from course_lib.train.nosync import NoSync
from course_lib.train.serial import SerialAllReduce
from tests.train.cases import Branches, Tied, mlp
from tests.train.on_ranks import OURS, RANKS, SMALL, alone, backward, grads, inputs, model_of, same, sent, together

on_ranks, got = together()


@on_ranks
def forward_decides():
    out = {}
    for name in ("serial flat", "no_sync", "bucketed one"):
        model = {"serial flat": lambda: SerialAllReduce(model_of(), flat=True), "no_sync": lambda: NoSync(model_of()),
                 "bucketed one": lambda: Bucketed(model_of())}[name]()
        for case, (forward_inside, backward_inside) in {"backward only": (False, True), "forward only": (True, False),
                                                        "both": (True, True)}.items():
            sent()
            with model.no_sync() if forward_inside else nullcontext():
                loss = model(inputs()).sum()
            with model.no_sync() if backward_inside else nullcontext():
                loss.backward()
            try:
                model.finish_gradient_synchronization()
                said = ""
            except RuntimeError as error:
                said = str(error)
            out[name, case] = sent()[0], said
    return out


def test_the_forward_decides(got) -> None:
    """A window of which nothing was sent is not finished in silence."""
    for rank in got(forward_decides):
        for (name, case), (calls, said) in rank.items():
            assert calls == (1 if case == "backward only" else 0), (name, case)
            assert ("under no_sync()" in said) == (case != "backward only"), (name, case, said)


@on_ranks
def no_sync_and_exceptions():
    model = Bucketed(model_of())
    try:
        with model.no_sync(), model.no_sync():
            raise KeyError
    except KeyError:
        pass
    sent()
    backward(model)
    model.finish_gradient_synchronization()
    return sent()[0]


def test_no_sync_ends_when_an_exception_leaves_it(got) -> None:
    assert got(no_sync_and_exceptions) == [1, 1]


@on_ranks
def collectives():
    out = {}
    layouts = {**OURS, "ddp": ("ddp", {"bucket_mb": SMALL, "first_bucket_mb": None}),
               "bucketed like ddp": ("bucketed", {"bucket_mb": SMALL, "first_bucket_mb": None})}
    for name, (strategy, options) in layouts.items():
        dist.group.WORLD.traffic.reset()
        model = wrap(strategy, model_of(), **options)
        broadcasts = dist.group.WORLD.traffic.calls["broadcast"]
        for _ in range(2):  # DDP's first iteration has a layout of its own
            sent()
            for i in range(3):
                with model.no_sync() if i < 2 else nullcontext():
                    backward(model, i)
            model.finish_gradient_synchronization()
        out[name] = *sent(), broadcasts
    return out


def test_collectives_and_bytes_are_what_the_strategy_says(got) -> None:
    parameters = list(mlp().parameters())
    full = sum(p.numel() for p in parameters) * 4  # bytes of one gradient; a ring of 2 sends it once
    for rank in got(collectives):
        assert rank["serial"] == (len(parameters), full, 1)
        assert rank["serial flat"] == rank["no_sync"] == (1, full, 1)
        assert rank["bucketed"][1] == rank["ddp"][1] == full
        assert rank["bucketed"][0] == 2 and rank["bucketed like ddp"][0] == rank["ddp"][0]


@on_ranks
def serial_every_micro_step():
    model = SerialAllReduce(model_of())
    sent()
    for i in range(3):
        backward(model, i)
    model.finish_gradient_synchronization()
    return *sent(), same(grads(model), alone(mlp, [0, 1, 2], "mean"))


def test_serial_sends_everything_after_every_micro_step(got) -> None:
    full = sum(p.numel() for p in mlp().parameters()) * 4
    assert got(serial_every_micro_step) == [(18, 3 * full, True)] * RANKS


@on_ranks
def synchronised_again():
    """Reduce, accumulate onto it, reduce again: W·old + Σ new is the mistake that a mean hides."""
    out = {}
    for name, (strategy, options) in OURS.items():
        for op in ("mean", "sum"):
            model = wrap(strategy, model_of(), op=op, **options)
            backward(model, 0)
            backward(model, 1)
            with model.no_sync():
                backward(model, 2)
            backward(model, 3)
            model.finish_gradient_synchronization()
            out[name, op, "in one window"] = same(grads(model), alone(mlp, [0, 1, 2, 3], op))
            with model.no_sync():
                backward(model, 4)
            backward(model, 5)
            model.finish_gradient_synchronization()
            out[name, op, "without zero_grad"] = same(grads(model), alone(mlp, [0, 1, 2, 3, 4, 5], op))
            loss = model(inputs(6)).square().sum()
            model.zero_grad(set_to_none=False)
            loss.backward()
            model.finish_gradient_synchronization()
            out[name, op, "zeroed after forward"] = same(grads(model), alone(mlp, [6], op))
    return out


def test_a_second_synchronisation_adds_only_what_is_new(got) -> None:
    for rank in got(synchronised_again):
        assert all(rank.values()), [k for k, ok in rank.items() if not ok]


@on_ranks
def left_alone_the_second_time():
    """A parameter that the second micro-step does not use keeps the sum of the first."""
    out = {}
    ones = torch.ones(4, 6)
    want = model_of(Branches)
    for x in (ones, -ones):
        (RANKS * want(x).sum()).backward()
    for name, (strategy, options) in OURS.items():
        if strategy == "bucketed":
            options = {**options, "find_unused": True}
        model = wrap(strategy, model_of(Branches), op="sum", **options)
        model(ones).sum().backward()
        model(-ones).sum().backward()
        model.finish_gradient_synchronization()
        out[name] = same(grads(model), grads(want))
    return out


def test_what_the_second_synchronisation_does_not_touch_stays_as_it_is(got) -> None:
    for rank in got(left_alone_the_second_time):
        assert all(rank.values()), rank


@on_ranks
def more_than_one_use():
    out = {}
    model = Bucketed(model_of(Tied), bucket_mb=0.0001)
    (model(inputs(0)).square().sum() + model(inputs(1)).square().sum()).backward()
    model.finish_gradient_synchronization()
    out["two forwards, one backward"] = same(grads(model), alone(Tied, [0, 1], "mean"))
    out["tied once"] = sorted(n for b in model.buckets for n in b) == sorted(n for n, _ in Tied().named_parameters())
    model = Bucketed(model_of(), bucket_mb=SMALL)
    checkpoint(model, inputs(0), use_reentrant=False).square().sum().backward()
    model.finish_gradient_synchronization()
    out["the whole model checkpointed"] = same(grads(model), alone(mlp, [0], "mean"))
    sent()
    with model.no_sync():
        loss = checkpoint(model, inputs(1), use_reentrant=False).square().sum()
    loss.backward()
    out["its second forward decides nothing"] = sent()[0] == 0
    backward(model, 2)
    with torch.no_grad():
        model(inputs(2))
    model.finish_gradient_synchronization()
    model(inputs(3))
    out["forwards without backward"] = same(grads(model), alone(mlp, [0, 1, 2], "mean"))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return out


def test_parameters_used_twice_and_forwards_beside_the_window(got) -> None:
    for rank in got(more_than_one_use):
        assert all(rank.values()), rank


@on_ranks
def unused():
    model = Bucketed(model_of(Branches), bucket_mb=0.0001, find_unused=True)
    x = inputs()
    x[0, 0] = 1.0 if dist.get_rank() == 0 else -1.0
    with model.no_sync():  # rank 0 uses left in the first micro-step only, rank 1 right only in the second
        model(torch.ones(4, 6)).sum().backward()
    model(x if dist.get_rank() else -torch.ones(4, 6)).sum().backward()
    model.finish_gradient_synchronization()
    return [(n, p.grad) for n, p in model.module.named_parameters()]


def test_what_no_rank_used_has_no_gradient_and_all_else_has_one_everywhere(got) -> None:
    """The used-set is the union over the window and over ranks; that the gradients are right is for test_early_use."""
    rank0, rank1 = (dict(r) for r in got(unused))
    assert [n for n, g in rank0.items() if g is None] == ["never.weight", "never.bias"]
    assert [n for n, g in rank1.items() if g is None] == ["never.weight", "never.bias"]
    assert all(torch.equal(rank0[n], rank1[n]) for n in rank0 if rank0[n] is not None)
