"""Reentrant checkpoints run a backward pass inside a backward pass: the gradient is right, or an error says what to do.
"""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib.launch import run
from course_lib.train import Sharded, wrap
from tests.train.cases import state
from tests.train.on_ranks import OURS, RANKS, SMALL, inputs, model_of

STRATEGIES = {**OURS, "every_step": ("every_step", {"bucket_mb": SMALL}), "delayed": ("delayed", {"delay": 0}),
              **{f"zero{n}": (f"zero{n}", {}) for n in (1, 2, 3)}}


class Part(nn.Module):
    """Checkpointed in the middle, at the end, at both ends, or one part twice."""

    def __init__(self, reentrant: bool = True) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 6)])

    def part(self, i, x):
        return checkpoint(self.layers[i], x, use_reentrant=self.reentrant)


class Middle(Part):
    def forward(self, x):
        return self.layers[2](self.part(1, self.layers[0](x)))


class Last(Part):
    def forward(self, x):
        return self.part(2, self.part(1, self.layers[0](x)))


class Twice(Part):
    def forward(self, x):
        x = self.layers[0](x)
        return self.layers[2](self.part(1, x) + self.part(1, 2 * x))


class Everything(Part):
    """The input needs no gradient, so that reentrant checkpoints would leave the parameters without one."""

    def forward(self, x):
        return self.part(2, self.part(1, self.part(0, x.requires_grad_())))


SEES_EVERY_USE = {"bucketed", "bucketed copies", "every_step", "delayed"}
"""A bucket leaves at a gradient's first arrival, and a reentrant checkpoint brings it once for each use."""
KINDS = {kind.__name__: kind for kind in (Middle, Last, Twice, Everything)}


def trained(name: str, kind: str) -> tuple[str, dict[str, torch.Tensor]]:
    strategy, options = STRATEGIES[name]
    model = wrap(strategy, model_of(KINDS[kind]), **options)
    optimizer = torch.optim.SGD(model.shards() if isinstance(model, Sharded) else model.parameters(), lr=0.05)
    for window in range(2):
        try:
            model(inputs(window)).square().sum().backward()
            model.finish_gradient_synchronization()
            optimizer.step()
        except RuntimeError as error:
            return str(error), {}
        optimizer.zero_grad()
    return "", model.full_state_dict() if isinstance(model, Sharded) else state(model.module)


def everything() -> dict:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return {case: trained(*case) for case in itertools.product(STRATEGIES, KINDS)}


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return run(everything, ranks=RANKS, fabric="loopback", timeout_s=60)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_right_or_refused(name: str, kind: str, results: list[dict]) -> None:
    torch.manual_seed(0)
    want = KINDS[kind](reentrant=False)
    optimizer = torch.optim.SGD(want.parameters(), lr=0.05)
    for window in range(2):
        for rank in range(RANKS):
            (want(inputs(window, rank)).square().sum() / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    refused = kind in ("Last", "Everything") or (kind == "Twice" and name in SEES_EVERY_USE)
    for said, found in (rank[name, kind] for rank in results):
        assert bool(said) == refused, said or "not refused"
        if said:
            assert "use_reentrant=False" in said
        else:
            for key, tensor in state(want).items():
                torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-5, msg=f"{name}, {key}")
