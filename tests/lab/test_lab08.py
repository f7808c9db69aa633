"""Exercises 8.1 to 8.3: right answers of several kinds pass, odd ones are told what is odd; the runs on ranks."""

from __future__ import annotations

import sys
import time
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.lab import CheckFailed, LabError, evaluate
from course_lib.lab.exercises.lab08 import delayed, rounds
from course_lib.lab.exercises.lab08.played_ranks import Missing, play
from course_lib.lab.guard import TookTooLong, time_limit
from course_lib.lab.workbench.buckets import OwnRunFailed
from course_lib.lab.workbench.loss_curves import loss_at, loss_curves, update_s
from course_lib.lab.workbench.stale import stale_runs
from course_lib.lab.workbench.updates import update_runs
from course_lib.link_cost import LinkCost
from course_lib.train.curve import Point
from course_lib.tune.calibrate import Load

seeds = st.integers(0, 10**6)


class Polling:
    """Asks all handles in turn, and steps whichever has arrived."""

    def __init__(self, wire, optimizers, scheduler):
        self.wire, self.optimizers, self.scheduler, self.flying = wire, optimizers, scheduler, {}

    def bucket_full(self, b, last):
        if last:
            self.flying[b] = self.wire.launch(b)

    def finish(self):
        while self.flying:
            for b in [b for b, handle in self.flying.items() if handle.is_completed()]:
                self.optimizers[b].step()
                del self.flying[b]
        self.scheduler.step()


class UnderBackward:
    """What has arrived when the next bucket is full is stepped there and then, the rest in finish."""

    def __init__(self, wire, optimizers, scheduler):
        self.wire, self.optimizers, self.scheduler, self.flying = wire, optimizers, scheduler, deque()

    def step_first(self):
        b, _ = self.flying.popleft()
        self.optimizers[b].step()

    def bucket_full(self, b, last):
        if not last:
            return
        self.flying.append((b, self.wire.launch(b)))
        while self.flying and self.flying[0][1].is_completed():
            self.step_first()

    def finish(self):
        while self.flying:
            self.flying[0][1].wait()
            self.step_first()
        self.scheduler.step()


class Ring:
    """One place for each gradient under way, taken in turn; the oldest is applied before the new one is launched."""

    def __init__(self, wire, param, optimizer, delay):
        self.wire, self.param, self.optimizer, self.delay = wire, param, optimizer, delay
        self.places, self.windows = {}, 0

    def apply_oldest(self):
        oldest = min(self.places)
        gradient, handle = self.places.pop(oldest)
        handle.wait()
        self.param.grad = gradient.clone()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end_of_window(self, gradient):
        if self.delay and len(self.places) == self.delay:
            self.apply_oldest()
        self.places[self.windows] = gradient, self.wire.launch(gradient)
        self.windows += 1
        if not self.delay:
            self.apply_oldest()

    def flush(self):
        for _ in range(len(self.places)):
            self.apply_oldest()


class Queue:
    """Hands its own copy to the wire, and writes the mean into the gradient that the parameter has."""

    def __init__(self, wire, param, optimizer, delay):
        self.wire, self.param, self.optimizer, self.left = wire, param, optimizer, delay
        self.queue = deque()
        self.param.grad = torch.zeros_like(param)

    def apply_oldest(self):
        mine, work = self.queue.popleft()
        while not work.is_completed():
            pass
        with torch.no_grad():
            self.param.grad.copy_(mine)
        self.optimizer.step()

    def end_of_window(self, gradient):
        mine = gradient.clone()
        self.queue.append((mine, self.wire.launch(mine)))
        self.left -= 1
        if self.left < 0:
            self.apply_oldest()

    def flush(self):
        [self.apply_oldest() for _ in list(self.queue)]


class OuterSGD:
    """PyTorch's own SGD as the outer optimizer."""

    def __init__(self, params, optimizer, mean, H, outer_lr, outer_momentum):
        self.params, self.inner, self.mean, self.H, self.left = params, optimizer, mean, H, H
        self.old = [p.detach().clone() for p in params]
        self.outer = torch.optim.SGD(self.old, lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)

    def step(self):
        self.inner.step()
        self.left -= 1
        if self.left:
            return
        self.left = self.H
        for old, p in zip(self.old, self.params):
            old.grad = self.mean(old - p.detach())
        self.outer.step()
        for old, p in zip(self.old, self.params):
            p.data = old.clone()


class Written:
    """New tensors everywhere, one flat mean for all parameters."""

    def __init__(self, params, optimizer, mean, H, outer_lr, outer_momentum):
        self.params, self.optimizer, self.mean, self.H = params, optimizer, mean, H
        self.lr, self.mu, self.steps = outer_lr, outer_momentum, 0
        self.start, self.v = self.flat(), 0

    def flat(self):
        return torch.cat([p.detach().flatten() for p in self.params])

    def step(self):
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.H == 0:
            way = self.mean(self.flat()) - self.start
            self.v = self.mu * self.v - way
            self.start = self.start + self.lr * way - self.lr * self.mu * self.v
            torch.nn.utils.vector_to_parameters(self.start.clone(), self.params)


@settings(max_examples=8, deadline=None)
@given(seeds)
@pytest.mark.parametrize(("number", "answer"), [("8.1", Polling), ("8.1", UnderBackward), ("8.2", Ring),
                                                 ("8.2", Queue), ("8.3", OuterSGD), ("8.3", Written)])
def test_right_answers_pass_whatever_is_drawn(number: str, answer, seed: int) -> None:
    result = evaluate(number, answer, seed=seed)
    assert result.ok, [row for row in result.rows if not row.ok]


def but(base: type, **methods) -> type:
    return type("Answer", (base,), methods)


@pytest.mark.parametrize(("number", "answer", "seen"), [
    ("8.1", type("Answer", (), {"finish": Polling.finish}), "has no method `bucket_full`"),
    ("8.1", but(Polling, finish=lambda self: 1 / 0), "finish() raised ZeroDivisionError"),
    ("8.1", but(Polling, bucket_full=lambda self, b, last: self.wire.launch("b")), "launch takes the number"),
    ("8.1", but(Polling, bucket_full=lambda self, b, last: last and [self.wire.launch(b), self.wire.launch(b)]),
     "launched a second time"),
    ("8.2", type("Answer", (), {"flush": Ring.flush}), "has no method `apply_oldest`"),
    ("8.2", but(Ring, flush=lambda self: 1 / 0), "flush() raised ZeroDivisionError"),
    ("8.2", but(Ring, end_of_window=lambda self, gradient: self.wire.launch(3.0)), "launch takes a gradient"),
    ("8.2", but(Ring, flush=lambda self: [self.wire.launch(torch.ones(4)) for _ in range(2)]), "more often than"),
    ("8.3", type("Answer", (), {}), "has no method `step`"),
    ("8.3", but(Written, step=lambda self: 1 / 0), "raised ZeroDivisionError"),
    ("8.3", but(Written, step=lambda self: self.mean(1.0)), "mean takes a tensor"),
])
def test_odd_answers(number: str, answer, seen: str) -> None:
    result = evaluate(number, answer, seed=0)
    assert not result.ok and seen in " ".join(row.seen for row in result.rows if not row.ok)


@pytest.mark.parametrize(("number", "base", "method"), [("8.1", Polling, "finish"), ("8.2", Ring, "flush"),
                                                         ("8.3", Written, "step")])
def test_stubs_say_so(number: str, base: type, method: str) -> None:
    def stub(self):
        raise NotImplementedError("exercise")

    with pytest.raises(CheckFailed, match=f"exercise {number} is not written yet"):
        evaluate(number, but(base, **{method: stub}))


def test_ranks_that_miss_each_other_are_told_and_nobody_waits_for_ever() -> None:
    with pytest.raises(Missing, match="did not come"):
        play(lambda rank, meeting: rank and meeting.mean(rank, 0, torch.ones(1)), 2)
    with pytest.raises(Missing, match="in their steps 1, 2"):
        play(lambda rank, meeting: meeting.mean(rank, rank, torch.ones(1)), 2)
    with pytest.raises(ZeroDivisionError):
        play(lambda rank, meeting: 1 / 0 if rank else meeting.mean(rank, 0, torch.ones(1)), 2)
    both = play(lambda rank, meeting: meeting.mean(rank, 0, torch.tensor([float(rank)])), 3)
    assert [float(mean) for mean in both] == [1.0, 1.0, 1.0]


def test_an_endless_loop_on_a_rank_ends_with_the_time_limit() -> None:
    def endless(rank: int, meeting: object) -> None:
        while True:
            pass

    before, deadline = set(sys._current_frames()), time.monotonic() + 5
    with pytest.raises(TookTooLong), time_limit(0.2):
        play(endless, 2)
    while (left := set(sys._current_frames()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, "a thread that still runs slows everything after it"


def test_what_the_checks_expect_is_what_pytorch_does() -> None:
    """The references of 8.2 and 8.3 are written out; torch.optim must give the same."""
    import random
    for seed in range(3):
        draw = random.Random(seed)
        late = delayed._played(Ring, delayed._problem(draw, 0))
        assert late.same(late.want)
        outer = rounds._played(OuterSGD, rounds._problem(draw, (0.7, 0.9), ranks=2, H=3))
        assert outer.right() and outer.agree()


# the runs on ranks

LOAD = Load("equal", 4, 0.04, 2.0, 4.0, 0.7, LinkCost(0.001, 8e-9))
LAYOUT = {"bucket_mb": 0.01, "first_bucket_mb": None}


@pytest.mark.slow
def test_updates_are_the_same_to_the_bit_however_much_is_hidden_and_stale_ones_are_not() -> None:
    found = update_runs(LOAD, {"plain": ("bucketed", LAYOUT), "StepPerBucket": ("step_per_bucket", LAYOUT),
                               "DDP": ("ddp", LAYOUT), "delay 1": ("delayed", {"delay": 1, **LAYOUT}),
                               "H = 2": ("local_sgd", {"every": 2})}, Polling, bucket_mb=0.01, updates=2,
                        fabric="paced", repeats=2)  # fmt: skip
    assert list(found) == ["serial", "yours", "plain", "StepPerBucket", "DDP", "delay 1", "H = 2"]
    assert [found[name].from_serial for name in ("serial", "yours", "plain", "StepPerBucket", "DDP")] == [0.0] * 5
    assert found["delay 1"].from_serial > 0 and found["H = 2"].from_serial > 0
    assert found["yours"].bytes == found["plain"].bytes == found["delay 1"].bytes == 2 * found["H = 2"].bytes
    for name in ("yours", "plain", "H = 2"):
        steps = [s for s in found[name].timeline.select(rank=0, kind="compute", step=0) if "optimizer" in s.name]
        assert len(steps) == 2 * len({s.bucket for s in steps}) == (4 if name == "yours" else 2)
    average = found["H = 2"].timeline.select(rank=0, kind="comm", step=0)
    assert not any(s.start < a.stop and a.start < s.stop for s in steps for a in average)  # averaging is no compute


def test_what_goes_wrong_on_a_rank_is_one_sentence() -> None:
    with pytest.raises(OwnRunFailed, match=r"rank \d: finish\(\) raised ZeroDivisionError"):
        update_runs(LOAD, {}, but(Polling, finish=lambda self: 1 / 0), bucket_mb=0.01, fabric="paced", repeats=2)
    with pytest.raises(OwnRunFailed, match=r"rank \d: flush\(\) raised ZeroDivisionError"):
        stale_runs(but(Ring, flush=lambda self: 1 / 0), Written)
    with pytest.raises(LabError, match=r"the class of exercise 8\.1"):
        update_runs(LOAD, {}, Polling(None, None, None))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_learners_delay_and_rounds_are_the_librarys_and_pytorchs(ranks: int) -> None:
    found = stale_runs(Ring, OuterSGD, ranks=ranks)
    assert [one.theirs for one in found] == ["the library's"] * 3 + ["the library's LocalSGD",
                                                                   "PyTorch's PostLocalSGDOptimizer",
                                                                   "the library's DiLoCo"]
    assert all(one.apart < 1e-5 for one in found), found
    assert max(len(line) for one in found for line in str(one).splitlines()) <= 88, "a narrow page breaks inside words"
    assert found[0].moved == 0 and all(one.moved > 1e-3 for one in found[1:])
    wrong = stale_runs(Ring, but(OuterSGD, step=lambda self: self.inner.step()), ranks=ranks)
    assert wrong[-1].apart > 1e-2


def test_loss_curves_start_equal_and_part() -> None:
    found = loss_curves({"plain": ("bucketed", {}), "late": ("delayed", {"delay": 1})}, seconds=0.05, fabric="paced",
                        measure_every=4)  # fmt: skip
    plain, late = found["plain"], found["late"]
    assert plain[0].loss == late[0].loss and plain[1].update == late[1].update == 4
    assert plain[1].loss != late[1].loss and plain[-1].seconds >= 0.05 and update_s(plain) > 0


def test_a_loss_between_two_points_is_on_the_line() -> None:
    points = [Point(0, 0.0, 5.0, 0), Point(10, 2.0, 3.0, 0), Point(20, 3.0, 2.0, 0)]
    assert loss_at(points, "update", 5) == 4 and loss_at(points, "seconds", 2.5) == 2.5
    assert loss_at(points, "update", 20) == loss_at(points, "update", 99) == 2
