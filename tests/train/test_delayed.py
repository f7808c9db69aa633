"""Delayed updates: nothing lost, nothing twice, and a resumed run equals one that was never interrupted."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.futures import Future

from course_lib.compress import TopK, hook
from course_lib.launch import run
from course_lib.train.bucketed import Bucketed
from course_lib.train.data import count_of
from course_lib.train.delayed import Delayed
from course_lib.train.reference import reference
from course_lib.train.reference_stale import delayed_reference
from course_lib.train.window import accumulate
from tests.train.cases import CASES, make_model, make_optimizer, mlp, state, windows
from tests.train.on_ranks import SMALL, alone, backward, grads, inputs, model_of, same, sent, together
from tests.train.trainer import Bomb, Mined, error_of, odd_one, parameters

DELAYS = (0, 1, 2, 5)
MICRO = 2


def train(case_name: str, delay: int, op: str, set_to_none: bool = True) -> dict[str, torch.Tensor]:
    case, rank = CASES[case_name], dist.get_rank()
    model = Delayed(make_model(case_name, seed=rank), delay, SMALL, SMALL / 4, op=op, find_unused=case.unused)
    optimizer = make_optimizer(p for p in model.parameters() if p.requires_grad)
    for window in windows(case_name, rank, MICRO):
        counts = [count_of(b) for b in window] if case.ragged else None
        accumulate(model, window, case.loss_of, case.normalise, counts, op)
        optimizer.step()
        optimizer.zero_grad(set_to_none)
    for _ in model.flush():
        optimizer.step()
        optimizer.zero_grad(set_to_none)
    return state(model.module)


def everything() -> dict:
    torch.set_num_threads(1)
    out = {(case, delay): train(case, delay, "mean") for case in CASES for delay in (1, 2)}
    return out | {("odd sizes", delay, op): train("odd sizes", delay, op, False)
                  for delay in DELAYS for op in ("mean", "sum")}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("ranks", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_parameters_equal_one_process_with_the_same_delay(ranks: int) -> None:
    results = run(everything, ranks=ranks, fabric="loopback")
    for (case, delay, *_), got in results[0].items():
        per_rank = [windows(case, r, MICRO) for r in range(ranks)]
        want = delayed_reference(lambda case=case: make_model(case), list(zip(*per_rank)), CASES[case].loss_of,
                                 make_optimizer, delay, CASES[case].normalise)
        for name, tensor in want.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=CASES[case].atol,
                                       msg=lambda m, where=f"{case}, delay {delay}, {name}": f"{where}: {m}")
    for key in results[0]:
        for other in results[1:]:
            assert all(torch.equal(other[key][n], t) for n, t in results[0][key].items()), key


def test_the_reference_of_delay_0_is_the_reference_and_of_delay_1_another() -> None:
    updates = list(zip(*[windows("equal", r, MICRO) for r in range(2)]))
    plain, none, one = (f(lambda: make_model("equal"), updates, CASES["equal"].loss_of, make_optimizer, *more, "micro")
                        for f, more in ((reference, ()), (delayed_reference, (0,)), (delayed_reference, (1,))))
    assert all(torch.equal(plain[n], none[n]) for n in plain)
    assert not any(torch.allclose(plain[n], one[n], atol=1e-4) for n in plain)


on_ranks, got = together()


@on_ranks
def what_arrives_when():
    """With parameters that never change, the gradient of window t is known: it must come out in window t + 2."""
    model = Delayed(model_of(), 2, SMALL)
    expected = [alone(mlp, [i], "mean") for i in range(4)]
    out, left, traffic = [], [], []
    sent()
    for i in range(4):
        backward(model, i)
        model.finish_gradient_synchronization()
        traffic.append(sent()[0])
        out.append(_which(grads(model), expected))
        model.zero_grad()
    for more in model.flush():
        left.append((more, _which(grads(model), expected)))
    return out, left, traffic[1:], len(model.buckets), sent()[0]


def _which(found: list, expected: list[list]) -> int | None:
    """The window whose gradient this is; None if there is no gradient at all."""
    if all(g is None for g in found):
        return None
    return next(i for i, want in enumerate(expected) if same(found, want))


def test_each_gradient_arrives_once_and_in_its_turn(got) -> None:
    for out, left, traffic, buckets, flushed in got(what_arrives_when):
        assert out == [None, None, 0, 1]
        assert left == [(1, 2), (0, 3)]
        assert traffic == [buckets] * 3 and flushed == 0


@on_ranks
def nothing_applied_at_first():
    """Neither weight decay nor momentum nor Adam's step count may move before the first gradient is there."""
    out = []
    for make in (make_optimizer, lambda p: optim.AdamW(p, lr=0.01)):
        model = Delayed(model_of(), 1, SMALL)
        optimizer = make(model.parameters())
        before = parameters(model)
        backward(model)
        model.finish_gradient_synchronization()
        optimizer.step()
        out.append((torch.equal(before, parameters(model)), len(optimizer.state)))
    return out


def test_the_first_windows_leave_parameters_and_state_alone(got) -> None:
    assert got(nothing_applied_at_first) == [[(True, 0)] * 2] * 2


@on_ranks
def on_the_wire_while_the_next_window_runs():
    model = Delayed(model_of(), 1, SMALL)
    for i in range(3):
        backward(model, i)
        model.finish_gradient_synchronization()
        model.zero_grad()
    (reducer, _), = model._under_way
    other = {b.flat.data_ptr() for b in reducer.buckets}.isdisjoint(b.flat.data_ptr() for b in model.reducer.buckets)
    return len(reducer.flying), len(reducer.buckets), other


def test_finish_leaves_the_windows_own_gradient_on_the_wire(got) -> None:
    for flying, buckets, other in got(on_the_wire_while_the_next_window_runs):
        assert flying == buckets > 1 and other


def steps(model, optimizer, which) -> None:
    for i in which:
        with model.no_sync():
            backward(model, 10 + i)
        backward(model, i)
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()


def flushed(model, optimizer) -> torch.Tensor:
    for _ in model.flush():
        optimizer.step()
        optimizer.zero_grad()
    return parameters(model)


class Late:
    """A collective that arrives 50 ms after it did."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def get_future(self) -> Future:
        future: Future = Future()

        def arrive() -> None:
            time.sleep(0.05)
            self._work.wait()
            future.set_result(None)
        threading.Thread(target=arrive).start()
        return future


class SlowTopK(TopK):
    def phases(self, bucket):
        rest = super().phases(bucket)
        yield Late(next(rest))
        yield from rest


@on_ranks
def error_feedback():
    """Top-k with its residual, and steps that leave no time to a gradient before the next."""
    ends = []
    for kind in (TopK, SlowTopK):
        module = model_of()
        kept = kind(module, k=0.2)
        model = Delayed(module, 1, SMALL, comm_hook=hook, hook_state=kept, rebuild=False)
        optimizer = make_optimizer(model.parameters())
        steps(model, optimizer, range(4))
        ends.append((flushed(model, optimizer), kept.updates))
    return torch.equal(ends[0][0], ends[1][0]), [updates for _, updates in ends]


def test_a_hook_remembers_the_window_before_on_a_slow_wire_too(got) -> None:
    assert got(error_feedback) == [(True, [4, 4])] * 2


@on_ranks
def resumed():
    out = []
    for delay in (1, 2):
        def new(delay=delay):
            model = Delayed(model_of(), delay, SMALL, rebuild=False)
            return model, make_optimizer(model.parameters())

        whole = new()
        steps(*whole, range(6))
        first = new()
        steps(*first, range(3))
        saved = copy.deepcopy((first[0].state_dict(), first[1].state_dict()))
        steps(*first, range(3, 6))  # saving leaves the run as it was
        second = new()
        for part, checkpoint in zip(second, saved):
            part.load_state_dict(checkpoint)
        steps(*second, range(3, 6))
        ends = [flushed(*run_) for run_ in (whole, first, second)]
        out.append([torch.equal(ends[0], end) for end in ends[1:]])
    too_many = Delayed(model_of(), 1, SMALL)
    try:
        too_many.load_state_dict(saved[0])
    except (ValueError, RuntimeError) as error:
        out.append("2 gradients under way, but delay=1" in str(error))
    return out


def test_a_resumed_run_equals_one_without_interruption(got) -> None:
    assert got(resumed) == [[[True, True], [True, True], True]] * 2


@on_ranks
def goes_on_after_a_flush():
    """Flushing after each half is two runs in a row: the same as two runs of a single process."""
    model = Delayed(model_of(), 1, SMALL)
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    want = model_of()
    plain = optim.SGD(want.parameters(), lr=0.05)
    for half in ([0, 1, 2], [3, 4]):
        queue = []
        for i in half:
            backward(model, i)
            model.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            shadow = copy.deepcopy(want)
            queue.append(_mean_gradient(shadow, i))
            if len(queue) > 1:
                _apply(want, plain, queue.pop(0))
        flushed(model, optimizer)
        _apply(want, plain, queue.pop(0))
    return torch.allclose(parameters(model), parameters(want), atol=1e-6)


def _mean_gradient(model: nn.Module, i: int) -> list[torch.Tensor]:
    model.zero_grad()
    for rank in range(2):
        (model(inputs(i, rank)).square().sum() / 2).backward()
    return grads(model)


def _apply(model: nn.Module, optimizer: optim.Optimizer, gradient: list[torch.Tensor]) -> None:
    for param, grad in zip(model.parameters(), gradient):
        param.grad = grad
    optimizer.step()


def test_training_goes_on_after_a_flush(got) -> None:
    assert got(goes_on_after_a_flush) == [True, True]


@on_ranks
def without_zero_grad():
    """What came out after window 2, the gradient of window 1, is added to by window 3: once, summed or averaged."""
    out = []
    for op in ("mean", "sum"):
        model = Delayed(model_of(), 1, SMALL, op=op)
        for i in range(4):
            backward(model, i)
            model.finish_gradient_synchronization()
        *_, left = [grads(model) for _ in model.flush()]
        out.append(same(left, alone(mlp, [1, 3], op)))
    return out


def test_a_gradient_that_is_kept_is_counted_once(got) -> None:
    assert got(without_zero_grad) == [[True, True]] * 2


@on_ranks
def refused():
    said = []
    model = Delayed(model_of(), 1, SMALL)
    backward(model)
    for action in (lambda: next(model.flush()), lambda: Delayed(model_of(), -1)):
        try:
            action()
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    return said


def test_misuse_is_refused(got) -> None:
    for inside, negative in got(refused):
        assert "flush() inside a window" in inside and "delay=-1" in negative


@on_ranks
def a_failed_window():
    """Window 1 fails on rank 1: its gradient is dropped everywhere, those before and after are applied once."""
    model = Delayed(Mined(), 1, SMALL, rebuild=False)
    expected = [_mean_gradient(copy.deepcopy(model.module), i) for i in range(4)]
    out = []
    for i in range(4):
        Bomb.armed = i == 1 and odd_one()
        said = error_of(lambda i=i: backward(model, i))
        Bomb.armed = False
        if i != 1:
            model.finish_gradient_synchronization()
            out.append(_which(grads(model), expected))
        elif not odd_one():
            said = error_of(model.finish_gradient_synchronization)
        assert bool(said) == (i == 1)
        model.zero_grad()
    for _ in model.flush():
        out.append(_which(grads(model), expected))
    return out


@pytest.mark.filterwarnings("ignore")
def test_a_failed_window_costs_its_own_gradient_alone(got) -> None:
    assert got(a_failed_window) == [[None, 0, 2, 3]] * 2


@on_ranks
def delay_0():
    pair = []
    for model in (Delayed(model_of(), 0, SMALL), Bucketed(model_of(), SMALL)):
        optimizer = make_optimizer(model.parameters())
        steps(model, optimizer, range(4))
        pair.append(parameters(model))
    return torch.equal(*pair)


def test_delay_0_is_bucketed_to_the_bit(got) -> None:
    assert got(delay_0) == [True, True]
