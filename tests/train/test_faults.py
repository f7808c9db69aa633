"""One rank does what the others do not: an error that names it, on every rank; no hang, no drift, and
training can go on. All faults run one after the other on the same ranks, so each must leave them healthy."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib.launch import run
from course_lib.train.bucketed import Bucketed
from course_lib.train.control import Control, SynchronizationError
from course_lib.train.ddp import wrap
from tests.train.cases import Branches, mlp

RANKS = 3
SMALL = 0.0004
STRATEGIES = {"serial": ("serial", {}), "no_sync": ("no_sync", {}), "bucketed": ("bucketed", {"bucket_mb": SMALL})}
FAULTS = {}


class Boom(Exception):
    pass


class Bomb(torch.autograd.Function):
    """Raises in backward where it is armed."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Bomb.armed:
            raise Boom
        return grad


class Mined(nn.Module):
    """An MLP with a bomb between its layers: later layers have their gradients when it goes off."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(Bomb.apply(x) if i == 2 else x)
        return x


class Trainer:
    """A wrapped model, its optimizer, and windows with an odd one out."""

    def __init__(self, strategy: str, kind=mlp, **options) -> None:
        torch.manual_seed(0)
        name, defaults = STRATEGIES[strategy]
        self.model = wrap(name, kind(), **{**defaults, **options})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batch = 0

    def loss(self) -> torch.Tensor:
        self.batch += 1
        generator = torch.Generator().manual_seed(self.batch * 10 + dist.get_rank())
        return self.model(torch.randn(4, 6, generator=generator)).square().mean()

    def step(self) -> None:
        self.model.finish_gradient_synchronization()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def window(self) -> None:
        with self.model.no_sync():
            self.loss().backward()
        self.loss().backward()
        self.step()

    def goes_on(self) -> bool:
        """Two more windows, and all ranks still hold the same parameters (which moved)."""
        before = parameters(self.model)
        self.optimizer.zero_grad()
        for _ in range(2):
            self.window()
        mine = parameters(self.model)
        sums = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(sums, mine)
        return all(torch.equal(s, mine) for s in sums) and not torch.equal(mine, before)


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def odd_one(rank: int = 1) -> bool:
    return dist.get_rank() == rank


def error_of(action) -> str:
    try:
        action()
    except (SynchronizationError, Boom) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fault(expected: dict[int | str, str] | str, strategies=tuple(STRATEGIES)):
    """`expected` says by rank (or "else") what its error must match; "" means no error."""
    expected = {"else": expected} if isinstance(expected, str) else expected

    def register(action):
        FAULTS[action.__name__] = action, expected, strategies
        return action
    return register


@fault(r"window 1: rank 1 skipped a backward pass .*rank 0: 2 backward of 2 .*rank 1: 1 backward of 2 forward")
def skips_the_last_backward(t: Trainer) -> str:
    t.window()
    with t.model.no_sync():
        t.loss().backward()
    loss = t.loss()

    def rest() -> None:
        if not odd_one():
            loss.backward()
        t.step()
    return error_of(rest)


@fault(r"window 1: rank 1 skipped a backward pass .*rank 1: 1 backward of 2 forward")
def skips_a_backward_under_no_sync(t: Trainer) -> str:
    t.window()
    with t.model.no_sync():
        loss = t.loss()
        if not odd_one():
            loss.backward()

    def rest() -> None:
        t.loss().backward()
        t.step()
    return error_of(rest)


@fault(r"window 0: ranks 0, 1 and 2 skipped a backward pass")
def finishes_without_a_backward(t: Trainer) -> str:
    return error_of(t.step)


@fault(r"window 1: the optimizer of rank 1 was about to step before finish_gradient_synchronization")
def skips_finish_and_steps(t: Trainer) -> str:
    t.window()

    def rest() -> None:
        t.loss().backward()
        t.optimizer.step() if odd_one() else t.step()
    return error_of(rest)


@fault(r"window 1: the optimizer of rank 1 was about to step")
def skips_backward_and_finish_and_steps(t: Trainer) -> str:
    t.window()
    loss = t.loss()

    def rest() -> None:
        if odd_one():
            t.optimizer.step()
        else:
            loss.backward()
            t.step()
    return error_of(rest)


@fault(r"the optimizer of ranks 0, 1 and 2 was about to step")
def everybody_steps_after_no_sync_alone(t: Trainer) -> str:
    """facts.md, F6: the replicas would part."""
    with t.model.no_sync():
        t.loss().backward()
    return error_of(t.optimizer.step)


@fault(r"the optimizer of ranks 0, 1 and 2 was about to step")
def steps_inside_backward(t: Trainer) -> str:
    handles = [p.register_post_accumulate_grad_hook(lambda p: t.optimizer.step()) for p in t.model.parameters()]

    def rest() -> None:
        t.loss().backward()
    said = error_of(rest)
    for handle in handles:
        handle.remove()
    return said


@fault(r"the last forward pass of ranks 0, 1 and 2 ran under no_sync")
def last_micro_step_under_no_sync(t: Trainer) -> str:
    t.loss().backward()
    with t.model.no_sync():
        t.loss().backward()
    return error_of(t.step)


@fault(r"window 0: every forward pass of rank 1 ran under no_sync")
def one_rank_stays_under_no_sync(t: Trainer) -> str:
    with t.model.no_sync():
        loss = t.loss()
    if not odd_one():
        loss = t.loss()

    def rest() -> None:
        loss.backward()
        t.step()
    return error_of(rest)


@fault(r"rank 1: 2 steps in 3 windows.* their parameters differ")
def one_rank_leaves_out_the_step(t: Trainer) -> str:
    t.window()
    t.window()
    t.loss().backward()
    t.model.finish_gradient_synchronization()
    if not odd_one():
        t.optimizer.step()
    t.optimizer.zero_grad()
    said = error_of(t.window)
    if odd_one():
        t.model.steps += 1  # pretend, so that the parameters alone are left to compare
    for p in t.model.parameters():
        dist.broadcast(p.data, 0)
    return said


@fault("Boom")
def backward_raises_everywhere(t: Trainer) -> str:
    with t.model.no_sync():
        t.loss().backward()
    Bomb.armed = True
    said = error_of(lambda: t.loss().backward())
    Bomb.armed = False
    return said


@fault("Boom")
def backward_raises_under_no_sync(t: Trainer) -> str:
    Bomb.armed = True
    with t.model.no_sync():
        said = error_of(lambda: t.loss().backward())
    Bomb.armed = False
    return said


@fault({1: "Boom", "else": r"an exception ended the backward pass of rank 1; the gradients .* were dropped"})
def backward_raises_on_one_rank(t: Trainer) -> str:
    Bomb.armed = odd_one()

    def rest() -> None:
        t.loss().backward()
        t.step()
    said = error_of(rest)
    Bomb.armed = False
    return said


@fault("an exception ended the backward pass of rank 1")
def backward_raises_on_one_rank_and_it_finishes_all_the_same(t: Trainer) -> str:
    Bomb.armed = odd_one()
    said = error_of(lambda: t.loss().backward())
    Bomb.armed = False
    return said if said and not odd_one() else error_of(t.step)


@fault("leave out this optimizer step")
def steps_after_a_failed_finish(t: Trainer) -> str:
    assert error_of(t.model.finish_gradient_synchronization)
    return error_of(t.optimizer.step)


@fault(r"got another gradient while its bucket was on the wire.*no_sync", ("bucketed",))
def two_backwards_after_two_forwards(t: Trainer) -> str:
    first, second = t.loss(), t.loss()
    first.backward()
    return error_of(second.backward)


def fault_names() -> list[tuple[str, str]]:
    return [(name, s) for name, (_, _, strategies) in FAULTS.items() for s in strategies]


def run_faults() -> dict:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    out = {}
    for name, strategy in fault_names():
        trainer = Trainer(strategy, Mined)
        out[name, strategy] = FAULTS[name][0](trainer), trainer.goes_on()
    return out


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return run(run_faults, ranks=RANKS, fabric="loopback")


@pytest.mark.parametrize(("name", "strategy"), fault_names())
def test_a_fault_is_an_error_on_every_rank_and_training_goes_on(name: str, strategy: str,
                                                                  results: list[dict]) -> None:
    expected = FAULTS[name][1]
    for rank, (said, goes_on) in enumerate(r[name, strategy] for r in results):
        pattern = expected.get(rank, expected.get("else"))
        assert re.search(pattern, said), f"rank {rank}: {said!r} does not say {pattern!r}"
        assert goes_on, f"rank {rank} cannot go on, or the replicas differ"


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
    """facts.md, F7: stock DDP steps in silence here, and the replicas part."""
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
