"""Who else has a hand in the gradient: a loop that replaces `.grad`, an optimizer inside backward, and frozen
and normalising layers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from course_lib.train import Bucketed, EveryStep, SynchronizationError, accumulate, wrap
from course_lib.train.data import synthetic
from course_lib.train.gpt import squared_loss
from course_lib.train.reference import reference
from tests.train.cases import make_optimizer, mlp, state
from tests.train.on_ranks import OURS, RANKS, SMALL, alone, backward, grads, model_of, same, sent, together

on_ranks, got = together()
DDP = {"ddp": ("ddp", {"bucket_mb": SMALL, "first_bucket_mb": None})}
EVERY = {"every_step": ("every_step", {"bucket_mb": SMALL})}


# what a training loop may do to `.grad` between windows, and must not cost the next one

def _cloned(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = p.grad.clone()


def _freed(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def _zeros(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


HANDS = {"cloned": (_cloned, [0, 1, 2]), "freed": (_freed, [1, 2]), "zeros": (_zeros, [1, 2]),
         "resumed": (lambda model: model.load_state_dict(model.state_dict()), [0, 1, 2])}


@on_ranks
def replaced():
    out = {}
    for name, (strategy, options) in {**OURS, **EVERY}.items():
        for op in ("mean", "sum"):
            for hand, (change, batches) in HANDS.items():
                model = wrap(strategy, model_of(), op=op, **options)
                backward(model, 0)
                model.finish_gradient_synchronization()
                change(model)
                with model.no_sync():
                    backward(model, 1)
                backward(model, 2)
                model.finish_gradient_synchronization()
                out[name, op, hand] = same(grads(model), alone(mlp, batches, op))
    return out


def test_a_loop_may_replace_grad_between_windows(got) -> None:
    """Views into buckets are made again where they were lost, and the numbers stay right."""
    for rank in got(replaced):
        assert all(rank.values()), [k for k, right in rank.items() if not right]


@on_ranks
def optimizer_in_backward():
    from torch.distributed.optim import _apply_optimizer_in_backward  # its import warns

    out = {}
    for name, (strategy, options) in {**OURS, **EVERY}.items():
        module = model_of()
        model = wrap(strategy, module, **options)
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
        before = state(module)
        try:
            with model.no_sync():
                backward(model)
            said = ""
        except SynchronizationError as error:
            said = str(error)
        out[name] = said, all(torch.equal(tensor, before[n]) for n, tensor in state(module).items())
    return out


def test_an_optimizer_inside_backward_is_refused_before_it_moves_anything(got) -> None:
    """It would step in every micro-step, on this rank's own gradient."""
    for rank in got(optimizer_in_backward):
        for name, (said, unmoved) in rank.items():
            assert "the optimizer of ranks 0 and 1 was about to step before finish" in said and unmoved, name


def half_frozen() -> nn.Module:
    """Every second layer is frozen, so that it lies between what shares a bucket."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))
    for layer in model[1::2]:
        layer.requires_grad_(False)
    return model


@on_ranks
def frozen_between():
    model = Bucketed(model_of(half_frozen), bucket_mb=0.00015, first_bucket_mb=None)
    out = []
    for i in range(2):
        sent()
        backward(model, i)
        in_backward = sent()
        model.finish_gradient_synchronization()
        out.append((*in_backward, sent()[0], sorted(n for bucket in model.buckets for n in bucket)))
    return out, same(grads(model), alone(half_frozen, [0, 1], "mean"))


def test_frozen_parameters_are_in_no_bucket_and_hold_none_up(got) -> None:
    trainable = sorted(n for n, p in half_frozen().named_parameters() if p.requires_grad)
    for windows, right in got(frozen_between):
        assert right
        assert windows == [(3, 3 * (36 + 6) * 4, 0, trainable)] * 2, "all buckets leave inside backward"


@on_ranks
def to_the_bit():
    out = {}
    layouts = {**OURS, **DDP, "one bucket": ("bucketed", {}), "a bucket each": ("bucketed", {"bucket_mb": 1e-6})}
    for name, (strategy, options) in layouts.items():
        model = wrap(strategy, model_of(), **options)
        optimizer = make_optimizer(model.parameters())
        for k in range(3):
            accumulate(model, list(synthetic(4, 6, 3, seed=k, rank=dist.get_rank())), squared_loss, "micro")
            optimizer.step()
            optimizer.zero_grad()
        out[name] = state(model.module)
    return out


def test_buckets_and_overlap_change_no_bit(got) -> None:
    """What travels when is no part of the mathematics, so no overlap has to be given up for convergence. (Two ranks: a
    sum of two is the same in either order.)"""
    for rank in got(to_the_bit):
        for name, found in rank.items():
            assert all(torch.equal(found[n], tensor) for n, tensor in rank["serial"].items()), name


def normed(kind: type[nn.Module] = nn.BatchNorm1d) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), kind(8), nn.Tanh(), nn.Linear(8, 1))


@on_ranks
def batch_norm():
    out = {}
    for name, (strategy, options) in {**OURS, **EVERY, **DDP}.items():
        model = wrap(strategy, model_of(normed), **options)
        optimizer = make_optimizer(model.parameters())
        accumulate(model, list(synthetic(4, 6, 3, rank=dist.get_rank())), squared_loss, "micro",
                   every=isinstance(model, EveryStep))
        optimizer.step()
        out[name] = state(model.module)
    return out


def test_batch_norm_sees_micro_batches_and_is_no_large_batch(got) -> None:
    """By design, and the same under stock DDP: parameters are those of one process that normalises each micro-batch by
    itself, running statistics are each rank's own, and one batch of all samples is another model."""
    micro = [[list(synthetic(4, 6, 3, rank=rank)) for rank in range(RANKS)]]
    large = [[[tuple(map(torch.cat, zip(*(b for rank in micro[0] for b in rank))))]]]
    for kind, equal in ((nn.BatchNorm1d, False), (nn.LayerNorm, True)):
        small_batches, one_batch = (reference(lambda kind=kind: model_of(lambda: normed(kind)), w, squared_loss,
                                              make_optimizer, "micro") for w in (micro, large))
        assert torch.allclose(small_batches["0.weight"], one_batch["0.weight"], atol=1e-4) == equal, kind
    want = reference(lambda: model_of(normed), micro, squared_loss, make_optimizer, "micro")
    rank0, rank1 = got(batch_norm)
    for name, found in rank0.items():
        for parameter, _ in normed().named_parameters():
            torch.testing.assert_close(found[parameter], want[parameter], rtol=1e-5, atol=1e-5,
                                       msg=f"{name}, {parameter}")
        assert not torch.equal(found["1.running_mean"], rank1[name]["1.running_mean"])
