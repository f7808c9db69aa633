"""Unused parameters, reentrant checkpoints, other models, and a rank that never comes."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib.launch import run
from course_lib.train.bucketed import Bucketed
from course_lib.train.control import Control
from tests.train.cases import Branches, mlp
from tests.train.trainer import RANKS, SMALL, Trainer, error_of, odd_one, parameters


def unused_parameters() -> dict:
    torch.set_num_threads(1)
    out = {}
    for who in ("one rank", "all ranks"):
        t = Trainer("bucketed", Branches, bucket_mb=0.0001)
        x = torch.full((4, 6), 1.0 if who == "all ranks" or odd_one() else -1.0)
        if who == "one rank":
            for p in t.model.module.never.parameters():
                p.requires_grad_(False)
            t = Trainer("bucketed", lambda m=t.model.module: m, bucket_mb=0.0001)
        before = parameters(t.model)
        t.model(x).sum().backward()
        out[who] = error_of(t.step), torch.equal(parameters(t.model), before), [p.grad for p in t.model.parameters()]
    return out


def test_an_unused_parameter_is_named_on_every_rank() -> None:
    """Stock DDP steps in silence here, and the replicas part."""
    for found in run(unused_parameters, ranks=RANKS, fabric="loopback"):
        said, untouched, left = found["one rank"]
        assert "'left.weight' on ranks 0 and 2" in said and "'right.bias' on rank 1" in said
        assert untouched and left == [None] * len(left)
        said, untouched, left = found["all ranks"]
        assert "'never.weight' on ranks 0, 1 and 2" in said and "find_unused=True" in said
        assert untouched and left == [None] * len(left)


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.out = nn.Linear(6, 6), mlp(), nn.Linear(1, 1)

    def forward(self, x):
        return self.out(checkpoint(self.inner, self.first(x), use_reentrant=True))


class ReentrantTwice(Reentrant):
    def forward(self, x):
        x = self.first(x)
        return checkpoint(self.inner, x, use_reentrant=True) + checkpoint(self.inner, 2 * x, use_reentrant=True)


def reentrant_checkpoints() -> dict:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    t = Trainer("bucketed", Reentrant)
    first = error_of(t.window)
    t = Trainer("bucketed", ReentrantTwice, find_unused=True)
    return {"one use": first, "two uses": error_of(t.window)}


def test_reentrant_checkpointing_is_right_or_refused() -> None:
    for found in run(reentrant_checkpoints, ranks=2, fabric="loopback"):
        assert found["one use"] == ""
        assert "use_reentrant=False" in found["two uses"]


def different_models() -> dict:
    return {
        "shape": error_of(lambda: Bucketed(nn.Linear(6, 5 if odd_one() else 4))),
        "frozen": error_of(lambda: Bucketed(_frozen(mlp(), odd_one()))),
        "settings": error_of(lambda: Bucketed(mlp(), bucket_mb=SMALL if odd_one() else 25)),
    }


def _frozen(model: nn.Module, freeze: bool) -> nn.Module:
    model[0].requires_grad_(not freeze)
    return model


def test_another_model_or_other_settings_on_one_rank_are_refused_at_the_start() -> None:
    for found in run(different_models, ranks=RANKS, fabric="loopback"):
        assert all("rank 1 wrapped another model" in said for said in found.values()), found


def never_comes() -> str:
    t = Trainer("bucketed")
    Control.timeout_s = 1.0
    return "" if odd_one() else error_of(t.window)


def test_a_rank_that_never_comes_is_named_in_time() -> None:
    said = run(never_comes, ranks=RANKS, fabric="loopback")
    assert said[1] == "" and all("waited for rank 1 at the end of window 0" in said[r] for r in (0, 2)), said
