"""Collectives of the model and of the training loop among the buckets: they pair up, or an error says so."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.launch import run
from course_lib.train import Bucketed, wrap
from tests.train.on_ranks import OURS, RANKS, SMALL, backward, grads, inputs, model_of, same
from tests.train.trainer import error_of

STRATEGIES = {**OURS, "every_step": ("every_step", {"bucket_mb": SMALL}),
              "ddp": ("ddp", {"bucket_mb": SMALL, "first_bucket_mb": None})}


class MeanOfRanks(torch.autograd.Function):
    """A collective of the model's own in forward and in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _mean(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _mean(grad, ctx.group), None


def _mean(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x / dist.get_world_size()


class Centred(nn.Module):
    """Subtracts the mean of all ranks between its layers; the last registered layer is used first."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(6, 1), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        for layer in (self.first, self.middle):
            x = torch.tanh(layer(x))
            x = x - MeanOfRanks.apply(x.mean(0, keepdim=True), None)
        return self.last(x)


class Forked(nn.Module):
    """Each rank takes a branch of its own, and behind the branches backward has a collective. It is as large as a
    bucket, so that gloo does not notice when it is summed with one."""

    group = None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.last = (nn.Linear(6, 6, bias=False) for _ in range(4))

    def forward(self, x):
        x = MeanOfRanks.apply(self.first(x), self.group)
        return self.last(torch.tanh(self.left(x) if dist.get_rank() == 0 else self.right(x)))


class Plain(Forked):
    """The branches alone."""

    def forward(self, x):
        return self.last(torch.tanh(self.left(x) if dist.get_rank() == 0 else self.right(x)))


def six(rank: int) -> torch.Tensor:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(rank))


def update(model: nn.Module) -> list[torch.Tensor | None]:
    """The gradient of one window."""
    model.zero_grad()
    model(six(dist.get_rank())).square().sum().backward()
    model.finish_gradient_synchronization()
    return grads(model)


def pair_up() -> dict:
    out = {}
    for name, (strategy, options) in STRATEGIES.items():
        model = wrap(strategy, model_of(Centred), **options)
        for i in range(3):  # the first on the layout of the start, the others on the rebuilt one
            backward(model, i)
            dist.all_reduce(torch.ones(3))  # a metric, between backward and finish
            model.finish_gradient_synchronization()
            dist.all_reduce(torch.ones(5))
        out[name] = grads(model)
    return out


def change_places() -> tuple[str, bool, list]:
    model = Bucketed(model_of(Forked), bucket_mb=1e-4, find_unused=True)
    said = error_of(lambda: update(model))
    dropped = all(p.grad is None for p in model.parameters())
    group = dist.new_group(list(range(RANKS)))
    group.queue = "of the model"
    apart = Bucketed(model_of(Forked), bucket_mb=1e-4, find_unused=True)
    apart.module.group = group
    return said, dropped, [update(apart) for _ in range(2)]


def no_false_alarm() -> bool:
    """Branches that differ between ranks change the time at which a bucket leaves, and not its place. Nor does a group
    that does not count what is issued raise one."""
    for group in (None, dist.new_group(list(range(RANKS)), backend="gloo")):
        model = Bucketed(model_of(Plain), bucket_mb=1e-4, find_unused=True, process_group=group)
        for i in range(3):
            backward(model, i)
            dist.all_reduce(torch.ones(2), group=group)
            model.finish_gradient_synchronization()
    return not hasattr(group, "issued")


def everything() -> dict:
    torch.set_num_threads(1)
    return {check.__name__: check() for check in (pair_up, change_places, no_false_alarm)}


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return run(everything, ranks=RANKS, fabric="loopback", timeout_s=30)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_collectives_in_forward_in_backward_and_before_finish(strategy: str, results: list[dict]) -> None:
    model = model_of(Centred)
    for i in range(3):
        x = [inputs(i, rank) for rank in range(RANKS)]
        for layer in (model.first, model.middle):
            x = [torch.tanh(layer(part)) for part in x]
            mean = sum(part.mean(0, keepdim=True) for part in x) / RANKS
            x = [part - mean for part in x]
        (sum(model.last(part).square().sum() for part in x) / RANKS).backward()
    for rank in results:
        assert same(rank["pair_up"][strategy], grads(model))


def test_a_bucket_that_was_summed_with_another_collective_is_an_error(results: list[dict]) -> None:
    """One rank's bucket is full before the model's collective, the other's only when backward has ended. On a group
    and a queue of its own the collective is out of the way, and all ranks hold the gradient of one process."""
    want = model_of(Forked)
    x = [want.first(six(rank)) for rank in range(RANKS)]
    mean = sum(x) / RANKS
    ends = [want.last(torch.tanh(branch(mean))) for branch in (want.left, want.right)]
    (sum(end.square().sum() for end in ends) / RANKS).backward()
    for said, dropped, right in (rank["change_places"] for rank in results):
        assert "window 0: the ranks sent their buckets at different places among other collectives" in said and dropped
        for found in right:
            assert same(found, grads(want))


def test_ranks_that_use_different_parameters_are_no_error(results: list[dict]) -> None:
    assert all(rank["no_false_alarm"] for rank in results)
