"""One rank does what the others do not: an error that names it, on every rank; no hang, no drift, and
training can go on. All faults run one after the other on the same ranks, so each must leave them healthy."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.distributed as dist

from course_lib.launch import run
from tests.train.trainer import RANKS, STRATEGIES, Bomb, Mined, Trainer, error_of, odd_one

FAULTS = {}


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
    """The replicas would part."""
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
