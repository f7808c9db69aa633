"""A discriminator gets gradients from the generator's loss, which its loop drops before its own backward pass."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.launch import run
from course_lib.train import Sharded, wrap
from course_lib.train.control import Control
from tests.train.cases import mlp
from tests.train.on_ranks import OURS, RANKS, SMALL, alone, backward, grads, inputs, model_of, same, together
from tests.train.trainer import error_of

EVERY = {"every_step": ("every_step", {"bucket_mb": SMALL}), "every_step sum": ("every_step", {"op": "sum"}),
         "delayed": ("delayed", {"delay": 0}), "zero1": ("zero1", {}), "zero2": ("zero2", {}), "zero3": ("zero3", {}),
         "zero1 unused": ("zero1", {"find_unused": True}), "zero3 unused": ("zero3", {"find_unused": True}),
         "bucketed unused": ("bucketed", {"find_unused": True})}
WHO = {"model": lambda model, optimizer: model.zero_grad(), "optimizer": lambda model, optimizer: optimizer.zero_grad()}
on_ranks, got = together(timeout_s=120)


def built(name: str, kind=mlp):
    strategy, options = (OURS | EVERY)[name]
    model = wrap(strategy, model_of(kind), **options)
    return model, torch.optim.SGD(model.shards() if isinstance(model, Sharded) else model.parameters(), lr=0.1)


def found(model: nn.Module) -> list[torch.Tensor | None]:
    """Whole gradients, of shards too; None where every rank has None."""
    if not isinstance(model, Sharded):
        return grads(model)
    out = {}
    for unit in model.units:
        none = [piece.grad is None for piece in unit.pieces]
        whole = unit.assemble([torch.zeros_like(p) if p.grad is None else p.grad for p in unit.pieces])
        out |= {slot.name: None if away else grad.clone() for slot, away, grad in zip(unit.slots, none, whole)}
    return [out[name] for name, _ in model.module.named_parameters()]


def equal(mine: list, want: list) -> bool:
    return [grad is None for grad in mine] == [grad is None for grad in want] and same(mine, want)


@on_ranks
def dropped():
    out = {}
    for name, who, between, passes in itertools.product(OURS | EVERY, WHO, (False, True), (1, 3)):
        model, optimizer = built(name)
        for _ in range(2):  # the second window has no first times
            if not name.startswith("serial") and name != "no_sync":
                for i in range(passes):
                    backward(model, i)
            else:
                backward(model, 0)
            if not between:
                WHO[who](model, optimizer)
            loss = model(inputs(4)).square().sum()
            if between:
                WHO[who](model, optimizer)
            loss.backward()
            backward(model, 5)
            model.finish_gradient_synchronization()
            right = equal(found(model), alone(mlp, [4, 5], "sum" if "sum" in name else "mean"))
            out[name, who, between, passes] = right
            optimizer.zero_grad()
    return out


def test_a_gradient_that_was_dropped_stays_away(got) -> None:
    for rank in got(dropped):
        assert not [case for case, right in rank.items() if not right]


class Halves(nn.Module):
    """The second half is only used where it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x, both: bool = True):
        y = self.halves[0](x)
        return y + self.halves[1](x) if both else y


@on_ranks
def unused():
    """What was dropped and is not used again, on one rank or on both."""
    out = {}
    once, twice = ((0, 1), (0,), ()), ((), (1,), (0, 1))
    for name in ("bucketed unused", "zero1 unused", "zero3 unused"):
        # what a bucket gets for a gradient that this rank does not have cannot be dropped here
        for first, both_of in itertools.product(once, twice) if name.startswith("zero") else [((), (0, 1))]:
            model, optimizer = built(name, Halves)
            model(inputs(0), both=dist.get_rank() in first).square().sum().backward()
            optimizer.zero_grad()
            model(inputs(1), both=dist.get_rank() in both_of).square().sum().backward()
            model.finish_gradient_synchronization()
            alone = model_of(Halves)
            for rank in range(RANKS):
                (alone(inputs(1, rank), both=rank in both_of).square().sum() / RANKS).backward()
            out[name, first, both_of] = equal(found(model), grads(alone))
    return out


def test_what_was_dropped_and_is_not_used_again_has_no_gradient(got) -> None:
    for rank in got(unused):
        assert not [case for case, right in rank.items() if not right]


@on_ranks
def to_the_end():
    """Dropped, and no backward pass after it; zeroed in place; and then a window as if nothing had been."""
    out = {}
    for name in ("bucketed", "every_step", "zero1", "zero2", "zero3"):
        model, optimizer = built(name)
        backward(model)
        optimizer.zero_grad()
        model.finish_gradient_synchronization()
        out[name, "none"] = all(grad is None for grad in found(model))
        if name.startswith("zero"):
            backward(model)
            optimizer.zero_grad(set_to_none=False)
            backward(model, 1)
            optimizer.zero_grad(set_to_none=False)
            model.finish_gradient_synchronization()
            out[name, "zeroed"] = all(not grad.any() for grad in found(model))
        backward(model, 2)
        model.finish_gradient_synchronization()
        out[name, "then"] = equal(found(model), alone(mlp, [2], "mean"))
    return out


def test_a_window_whose_gradient_was_dropped_at_its_end(got) -> None:
    for rank in got(to_the_end):
        assert not [case for case, right in rank.items() if not right]


@on_ranks
def zeroed():
    """In place, before and after the forward that follows, where it would be zeroed in one of two sets only."""
    out = {}
    for op, after in itertools.product(("mean", "sum"), (False, True)):
        model = wrap("every_step", model_of(), op=op)

        def window(hand: bool, model: nn.Module = model, after: bool = after) -> None:
            for i in range(2):
                backward(model, i)
            if hand and not after:
                model.zero_grad(set_to_none=False)
            loss = model(inputs(2)).square().sum()
            if hand and after:
                model.zero_grad(set_to_none=False)
            loss.backward()
            model.finish_gradient_synchronization()
        for hand in (False, True):
            out[op, after, hand] = error_of(lambda window=window, hand=hand: window(hand))
    return out


def test_one_of_two_sets_that_is_zeroed_in_place_is_refused(got) -> None:
    for rank in got(zeroed):
        for (op, after, hand), words in rank.items():
            expected = "was changed while it was on the wire" if hand else ""
            assert (expected in words) if hand else words == "", (op, after, words)


# what a ZeRO model's parameters and shards have to say when somebody looks for gradients in them

@on_ranks
def looked_for():
    out = {}
    for name in ("zero1", "zero2", "zero3"):
        model, optimizer = built(name)
        clip = nn.utils.clip_grad_norm_
        backward(model)
        looks = {"parameters": model.parameters, "shards": model.shards}
        for what, params in looks.items():
            with pytest.raises(RuntimeError) as refused:
                clip(params(), 0.01)
            out[name, what, "inside"] = str(refused.value)
        backward(model, 1)
        model.finish_gradient_synchronization()
        with pytest.raises(RuntimeError) as refused:
            clip(model.parameters(), 0.01)
        out[name, "parameters", "after"] = str(refused.value)
        right = equal(found(model), alone(mlp, [0, 1], "mean"))
        model.clip_grad_norm(0.01)
        optimizer.step()
        optimizer.zero_grad()
        backward(model)
        model.finish_gradient_synchronization()
        model.close()
        out[name, "right"] = right and all(p.grad is None for p in model.module.parameters())
    return out


def test_clipping_where_no_gradient_is_is_refused_with_what_to_do(got) -> None:
    for rank in got(looked_for):
        for (name, what, *when), words in rank.items():
            if what == "right":
                assert words
            else:
                assert ("clip with model.clip_grad_norm(max_norm)" if what == "parameters" else
                        "after finish_gradient_synchronization()") in words, (name, what, when)


@on_ranks
def compiled():
    inner, other = model_of(), model_of()
    inner[0] = torch.compile(inner[0], backend="eager")
    other.compile(backend="eager")
    out = []
    for module in (inner, other, torch.compile(model_of(), backend="eager")):
        with pytest.raises(ValueError, match="is compiled, and what is compiled does not gather") as refused:
            wrap("zero3", module)
        out.append(str(refused.value))
    return out


def test_a_compiled_module_is_refused_by_name(got) -> None:
    for first, second, third in got(compiled):
        assert first.startswith("'0'") and second.startswith("'Sequential'") and third.startswith("'OptimizedModule'")


def left_out() -> str:
    Control.timeout_s = 3.0
    model, _ = built("zero3")
    backward(model)
    model.finish_gradient_synchronization()
    if dist.get_rank() == 0:
        return error_of(lambda: backward(model)) or "never"
    return error_of(model.finish_gradient_synchronization)


def test_a_rank_that_leaves_a_forward_pass_out_is_named() -> None:
    with pytest.raises(Exception, match="pass that rank 1 left out, which ran 0 forward and 0 backward passes"):
        run(raises, left_out, ranks=RANKS, fabric="loopback", timeout_s=60)


def raises(check) -> None:
    if words := check():
        raise RuntimeError(words)
