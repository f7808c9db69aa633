"""The way that NCCL's buckets go, with a CPU in the GPU's place: both phases issued at once, and the host in no hurry
to hear whether the numbers are finite."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist

from course_lib.compress import Compressor, NonFiniteGradient, compressor
from course_lib.launch import run
from tests.compress.given import Given, train, wrapped_with
from tests.compress.test_state import STATES, equal, not_finite

KINDS = pytest.mark.parametrize("kind", ["bucketed", "ddp"])


@contextlib.contextmanager
def on_stream():
    """As if NCCL carried every bucket. Yields the moments at which the host asked for an answer."""
    asked, patch = [], pytest.MonkeyPatch()

    def answer(finite):
        return lambda: asked.append(torch._C._current_graph_task_id()) or bool(finite)

    patch.setattr(Compressor, "_on_stream", lambda self, bucket: True)
    patch.setattr(compressor, "beside", contextlib.nullcontext)
    patch.setattr(compressor, "answer", answer)
    patch.setattr(compressor, "Future", lambda devices: torch.futures.Future())
    try:
        yield asked
    finally:
        patch.undo()


def both_ways(kind: str):
    out = {}
    for name, state_of in STATES.items():
        found = []
        for way in (contextlib.nullcontext, on_stream):
            model = Given()
            with way():
                state = state_of(model)
                got = train(wrapped_with(state, model, kind), dist.get_rank(), range(4))
                found.append({**dict(enumerate(got)), "state": state.state_dict()})
        out[name] = equal(*found), state.updates
    return out


@KINDS
def test_gradients_and_memories_are_those_of_the_other_way(kind) -> None:
    for got in run(both_ways, kind, ranks=2, fabric="loopback"):
        assert got == dict.fromkeys(STATES, (True, 4))


def skipped(kind: str):
    with on_stream():
        return not_finite(kind)


@KINDS
def test_a_skipped_update_leaves_every_residual_as_if_it_had_not_been(kind) -> None:
    for got in run(skipped, kind, ranks=2, fabric="loopback"):
        assert got == dict.fromkeys(STATES, (True, True, True))


def raised(kind: str):
    def spoil(grads, update):
        if dist.get_rank() == 1:
            grads["wide"][3, 5] = float("nan")
        return grads

    out = {}
    for name, state_of in STATES.items():
        model = Given()
        with on_stream():
            state = state_of(model)
            wrapped = wrapped_with(state, model, kind)
            train(wrapped, dist.get_rank(), range(2))
            before = copy.deepcopy(state.state_dict())
            with pytest.raises(NonFiniteGradient) as error:
                train(wrapped, dist.get_rank(), range(2, 3), spoil)
            out[name] = str(error.value), equal(before, state.state_dict()), state.updates
            if kind == "bucketed":
                train(wrapped, dist.get_rank(), range(3, 4))
                assert state.updates == 3
    return out


@KINDS
def test_a_gradient_that_is_not_finite_is_an_error_of_backward_on_every_rank(kind) -> None:
    for got in run(raised, kind, ranks=2, fabric="loopback"):
        for name, (message, unchanged, updates) in got.items():
            assert "not finite" in message and ("rank 1" in message or name == "powersgd")
            assert unchanged and updates == 2, name


def moments(on_nonfinite: str):
    out = {}
    for name, state_of in STATES.items():
        model = Given()
        with on_stream() as asked:
            state = state_of(model, on_nonfinite=on_nonfinite)
            wrapped = wrapped_with(state, model)
            buckets = len(wrapped.buckets)
            train(wrapped, dist.get_rank(), range(2))
            out[name] = len(asked) / buckets
            state.state_dict()
            assert len(asked) == 2 * buckets
    return out


@pytest.mark.parametrize("on_nonfinite, windows", [("raise", 2.0), ("nan", 1.0)])
def test_the_host_asks_once_a_window_at_its_end_or_before_the_next(on_nonfinite, windows) -> None:
    assert run(moments, on_nonfinite, ranks=2, fabric="loopback") == [dict.fromkeys(STATES, windows)] * 2


def counted():
    def spoil(grads, update):
        grads["wide"][3, 5] = float("nan")
        return grads

    out = {}
    for name, state_of in STATES.items():
        model = Given()
        with on_stream():
            state = state_of(model, on_nonfinite="nan")
            wrapped = wrapped_with(state, model)
            train(wrapped, dist.get_rank(), range(2))
            train(wrapped, dist.get_rank(), range(2, 3), spoil)
            out[name] = state.updates
    return out


def test_a_skipped_update_is_not_counted_though_nobody_has_asked_yet() -> None:
    assert run(counted, ranks=2, fabric="loopback") == [dict.fromkeys(STATES, 2)] * 2
