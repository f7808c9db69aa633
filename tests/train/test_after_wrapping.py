"""What a loop or an optimizer meets once a module is wrapped: the order in memory, changes of the model, copies, and
derivatives of derivatives."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.train import Sharded, accumulate, wrap
from course_lib.train.control import Control
from course_lib.train.data import synthetic
from course_lib.train.gpt import squared_loss
from course_lib.train.reference import reference
from tests.train.cases import make_optimizer, state
from tests.train.on_ranks import OURS, RANKS, SMALL, backward, grads, inputs, model_of, together
from tests.train.trainer import error_of

VIEWS = {**OURS, "every_step": ("every_step", {"bucket_mb": SMALL}), "delayed": ("delayed", {"delay": 0})}
ZERO = {"zero1": ("zero1", {}), "zero3": ("zero3", {})}
on_ranks, got = together()


def said(call) -> str:
    """The error, of whatever kind."""
    try:
        call()
    except Exception as error:
        return str(error)
    return ""


# the order of a parameter's dimensions in memory

class Turned(nn.Module):
    """A transposed matrix, and a convolution in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(12, 6).t())
        self.conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.out = nn.Linear(5, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.conv((x @ self.turned).view(-1, 3, 2, 2)))[:, :, 0, 0])


def fused(params) -> torch.optim.Optimizer:
    """It walks over parameter and gradient side by side in memory."""
    return torch.optim.AdamW(params, lr=0.02, fused=True)


def windows_of(rank: int) -> list:
    return [list(synthetic(4, 6, 2, seed=k, rank=rank)) for k in range(2)]


def trained(strategy: str, options: dict, kind, make=fused) -> dict[str, torch.Tensor]:
    model = wrap(strategy, model_of(kind), **options)
    optimizer = make(model.shards() if isinstance(model, Sharded) else model.parameters())
    if strategy == "step_per_bucket":
        model.take_optimizer(optimizer)
    for window in windows_of(dist.get_rank()):
        accumulate(model, window, squared_loss, "micro", every=strategy == "zero3")
        if strategy != "step_per_bucket":
            optimizer.step()
        optimizer.zero_grad()
    return model.full_state_dict() if isinstance(model, Sharded) else state(model.module)


@on_ranks
def order_in_memory():
    strategies = {**VIEWS, "step_per_bucket": ("step_per_bucket", {"bucket_mb": SMALL})}
    return {name: trained(strategy, options, Turned) for name, (strategy, options) in strategies.items()}


def close(found: dict, want: dict) -> bool:
    return all(torch.allclose(found[name], tensor, rtol=1e-5, atol=1e-5) for name, tensor in want.items())


def of_one_process(kind, make) -> dict[str, torch.Tensor]:
    windows = [list(ranks) for ranks in zip(*(windows_of(rank) for rank in range(RANKS)))]
    return reference(lambda: model_of(kind), windows, squared_loss, make, "micro")


def test_a_fused_optimizer_meets_gradients_in_the_order_of_their_parameters(got) -> None:
    want = of_one_process(Turned, fused)
    for rank in got(order_in_memory):
        assert not [name for name, found in rank.items() if not close(found, want)]


# a view that `.grad.data = …` leads elsewhere

@on_ranks
def led_elsewhere():
    out = {}
    for name, (strategy, options) in VIEWS.items():
        model = wrap(strategy, model_of(), **options)
        for i in range(2):
            backward(model, i)
            model.finish_gradient_synchronization()
            found = grads(model)
            for p in model.parameters():
                p.grad.data = 0.5 * p.grad.data
            model.zero_grad()
        out[name] = found
    return out


def test_a_gradient_whose_data_were_replaced_is_sent_again(got) -> None:
    rank0, rank1 = got(led_elsewhere)
    for name, found in rank0.items():
        for mine, theirs, right in zip(found, rank1[name], rank0["bucketed copies"]):
            assert torch.equal(mine, theirs) and torch.allclose(mine, right, atol=1e-6), name


# a model that changes

def _replace(module: nn.Module) -> None:
    module[0] = nn.Linear(6, 16)


def _add(module: nn.Module) -> None:
    module.add_module("extra", nn.Linear(1, 1))


CHANGES = {"replaced": (_replace, "'0.weight' was added or replaced after the module was wrapped"),
           "added": (_add, "'extra.weight' was added or replaced"),
           "normed": (lambda module: nn.utils.parametrizations.weight_norm(module[0]), "was added or replaced"),
           "converted": (lambda module: module.double(), "'0.weight' was torch.float32 on cpu")}


@on_ranks
def changed():
    out = {}
    for name, (strategy, options) in {**VIEWS, **ZERO, "local_sgd": ("local_sgd", {})}.items():
        for change, (make, _) in CHANGES.items():
            if change == "normed" and name in ZERO:
                continue  # torch refuses to norm what has no elements
            model = wrap(strategy, model_of(), **options)
            backward(model)
            model.finish_gradient_synchronization()
            make(model.module)
            out[name, change] = said(lambda model=model: model(inputs()))
        model = wrap(strategy, model_of(), **options)
        out[name, "no change"] = said(lambda model=model: model.to("cpu").float()(inputs()))
    return out


def test_a_model_that_changed_is_refused_by_the_next_forward(got) -> None:
    for rank in got(changed):
        for (name, change), words in rank.items():
            expected = "" if change == "no change" else CHANGES[change][1]
            assert (expected in words) if expected else words == "", (name, change, words)


# copies

@on_ranks
def copies():
    model, sharded = wrap("bucketed", model_of()), wrap("zero3", model_of())
    with sharded.gathered():
        inside, alone = said(sharded.module.state_dict), copy.deepcopy(sharded.module)
    return {"deepcopy": said(lambda: copy.deepcopy(model)), "save": said(lambda: torch.save(model, io.BytesIO())),
            "sharded": said(lambda: copy.deepcopy(sharded)), "inner state": said(sharded.module.state_dict),
            "gathered state": inside,
            "on one rank": dist.get_rank() == 1 or torch.equal(alone(inputs()), model_of()(inputs()))}


def test_a_wrapper_is_not_copied_and_empty_parameters_are_not_saved(got) -> None:
    for rank in got(copies):
        assert "copy model.module" in rank["deepcopy"] and "save model.state_dict()" in rank["save"]
        assert all("full_state_dict()" in rank[what] for what in ("sharded", "inner state", "gathered state"))
        assert rank["on one rank"]


# backward passes that are not one a forward

def _past(model: nn.Module) -> None:
    backward(model.module)
    model.finish_gradient_synchronization()


def _two_losses(model: nn.Module) -> None:
    y = model(inputs())
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()
    model.finish_gradient_synchronization()


def _forwards_first(model: nn.Module) -> None:
    losses = [model(inputs(i)).sum() for i in range(2)]
    for loss in losses:
        loss.backward()
    model.finish_gradient_synchronization()


PASSES = {"past the wrapper": (_past, "call model(…) and not model.module(…)"),
          "two losses": (_two_losses, "up the losses"), "forwards first": (_forwards_first, "up the losses"),
          "with a graph": (lambda model: model(inputs()).sum().backward(create_graph=True), "create_graph=True")}


@on_ranks
def passes():
    out = {}
    for name, (strategy, options) in {**VIEWS, **ZERO}.items():
        for case, (go, _) in PASSES.items():
            model = wrap(strategy, model_of(), **options)
            out[name, case] = said(lambda model=model, go=go: go(model))
    out.pop(("zero3", "past the wrapper"))  # its parameters are not there then
    out.pop(("zero1", "past the wrapper"))
    return out


def test_backward_passes_without_a_forward_of_their_own_are_refused_with_the_remedy(got) -> None:
    for rank in got(passes):
        for (name, case), words in rank.items():
            assert PASSES[case][1] in words.replace("Add", "add").replace("add \"", "add "), (name, case, words)


def penalised(model: nn.Module) -> torch.Tensor:
    x = inputs().requires_grad_()
    y = model(x)
    slope, = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().sum() + (slope.norm(dim=1) - 1).square().sum()


@on_ranks
def penalty():
    out = {}
    for name in ("bucketed", "zero1", "zero3"):
        model = wrap(name, model_of())

        def go(model: nn.Module = model) -> None:
            penalised(model).backward()
            model.finish_gradient_synchronization()
        out[name] = said(go)
    return out


def test_a_gradient_penalty_is_refused_where_parameters_are_gone(got) -> None:
    for rank in got(penalty):
        assert rank["bucketed"] == rank["zero1"] == "" and "use stage 1 or 2" in rank["zero3"]


# gradients on the wire

HANDS = {"clipped": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
         "zeroed": lambda model: model.zero_grad(set_to_none=False)}


@on_ranks
def touched():
    out = {}
    for name in ("bucketed", "bucketed copies", "every_step", "delayed"):
        strategy, options = VIEWS[name]
        for hand, change in HANDS.items():
            model = wrap(strategy, model_of(), **options)
            backward(model)
            if dist.get_rank() == 0:
                change(model)
            out[name, hand] = error_of(model.finish_gradient_synchronization)
            backward(model)
            out[name, hand, "then"] = error_of(model.finish_gradient_synchronization)
    return out


def test_a_gradient_that_is_changed_on_the_wire_is_an_error_on_every_rank(got) -> None:
    for rank in got(touched):
        for (name, hand, *then), words in rank.items():
            expected = "" if then else "a gradient of rank 0 was changed while it was on the wire; clip"
            assert (expected in words) if expected else words == "", (name, hand, words)


# what layers do to their own parameters, and complex ones

class Normed(nn.Module):
    """The layer before the last computes its weight from two others whenever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.utils.weight_norm(nn.Linear(6, 5)), nn.Linear(5, 1))

    def forward(self, x):
        return self.layers(x)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn, self.out = nn.Parameter(torch.randn(6, 5, dtype=torch.complex64)), nn.Linear(5, 1)

    def forward(self, x):
        return self.out((x.to(self.turn.dtype) @ self.turn).abs())


@on_ranks
@pytest.mark.filterwarnings("ignore")
def kinds():
    return {(kind.__name__, name): trained(*strategy, kind, make_optimizer)
            for kind in (Normed, Complex) for name, strategy in {**ZERO, "bucketed": ("bucketed", {})}.items()}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weight_norm_and_complex_parameters(got) -> None:
    want = {kind.__name__: of_one_process(kind, make_optimizer) for kind in (Normed, Complex)}
    for rank in got(kinds):
        assert not [key for key, found in rank.items() if not close(found, want[key[0]])]


# ranks that meet at different places

@on_ranks
def places():
    control = Control(dist.group.WORLD)
    what = ("the token count of a window", "the end of window 3")[dist.get_rank()]
    apart = error_of(lambda: control.exchange(bytes(8 + 100 * dist.get_rank()), what))
    return apart, control.exchange(bytes([dist.get_rank()]), f"the end of window {dist.get_rank()}")


def test_ranks_at_different_places_are_named_and_meet_again(got) -> None:
    for apart, again in got(places):
        assert "rank 0 at the token count of a window, rank 1 at the end of window 3" in apart
        assert again == [b"\0", b"\1"]
