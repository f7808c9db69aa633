"""Exercises 3.1 to 3.4: right answers of several kinds pass, odd ones are told what is odd; the runs on ranks."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.lab import CheckFailed, LabError, evaluate
from course_lib.lab.pictures.over_n import over_n
from course_lib.lab.workbench.buckets import OwnRunFailed
from course_lib.lab.workbench.damage import damage
from course_lib.lab.workbench.windows import window_runs

seeds = st.integers(0, 10**6)


class Depth:
    """Counts how many blocks are open, and lets the forward write down the answer."""

    def __init__(self, all_reduce):
        self.all_reduce, self.depth, self.quiet = all_reduce, 0, False

    @contextmanager
    def no_sync(self):
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def before_forward(self):
        self.quiet = self.depth > 0

    def after_backward(self):
        if not self.quiet:
            self.all_reduce()

    def inside_no_sync(self, body):
        with self.no_sync():
            body()


def one_for_all(my_counts, ranks, all_reduce_sum):
    return [ranks / all_reduce_sum(sum(my_counts))] * len(my_counts)


def two_sums(my_counts, ranks, all_reduce_sum):
    """Asks how many ranks there are, too, and returns a tuple of tensors."""
    total, size = all_reduce_sum(float(sum(my_counts))), all_reduce_sum(1)
    return tuple(torch.tensor(size / total, dtype=torch.float64) for _ in my_counts)


def nothing_for_nothing(my_counts, ranks, all_reduce_sum):
    """A micro-batch without tokens has a loss of 0, so its factor does not matter."""
    total = all_reduce_sum(sum(my_counts))
    return [ranks / total if count else 0 for count in my_counts]


def cut_first(batches, N, micro_step, update):
    for window in [batches[i : i + N] for i in range(0, len(batches), N)]:
        for batch in window:
            micro_step(batch, 1 / len(window))
        update()


def in_single_precision(batches, N, micro_step, update):
    cut_first(batches, N, lambda batch, factor: micro_step(batch, torch.tensor(factor)), update)


def count_down(batches, N, micro_step, update):
    left = len(batches)
    for i, batch in enumerate(batches):
        if i % N == 0:
            size = min(N, left)
        micro_step(batch, 1 / size)
        left -= 1
        if i % N == size - 1:
            update()


def by_hand(params, N, micro_step, synchronise, step, max_norm):
    for i in range(N):
        micro_step(i)
    synchronise()
    norm = torch.cat([param.grad.flatten() for param in params]).norm()
    if norm > max_norm:
        for param in params:
            param.grad = param.grad * (max_norm / norm)
    step()


def from_nothing(params, N, micro_step, synchronise, step, max_norm):
    """Begins with gradients that are None, as `zero_grad` leaves them."""
    for param in params:
        param.grad = None
    by_torch(params, N, micro_step, synchronise, step, max_norm)


def by_torch(params, N, micro_step, synchronise, step, max_norm):
    for i in range(N):
        micro_step(i)
    synchronise()
    torch.nn.utils.clip_grad_norm_(params, max_norm)
    step()


@settings(max_examples=10, deadline=None)
@given(seeds)
@pytest.mark.parametrize(
    ("number", "answer"),
    [
        ("3.1", Depth),
        ("3.2", one_for_all),
        ("3.2", two_sums),
        ("3.2", nothing_for_nothing),
        ("3.3", cut_first),
        ("3.3", in_single_precision),
        ("3.3", count_down),
        ("3.4", by_hand),
        ("3.4", from_nothing),
        ("3.4", by_torch),
    ],
)
def test_right_answers_pass_whatever_is_drawn(number: str, answer, seed: int) -> None:
    result = evaluate(number, answer, seed=seed)
    assert result.ok, [row for row in result.rows if not row.ok]


def with_method(name, body):
    return type("GradientSync", (Depth,), {name: body})


def fills_up_the_last(batches, N, micro_step, update):
    for i in range(0, len(batches), N):
        window = batches[i : i + N]
        for batch in window + batches[: N - len(window)]:
            micro_step(batch, 1 / N)
        update()


def once_more_after_clipping(params, N, micro_step, synchronise, step, max_norm):
    by_torch(params, N, micro_step, synchronise, lambda: (synchronise(), step()), max_norm)


@pytest.mark.parametrize(("number", "answer"), [("3.3", fills_up_the_last), ("3.4", once_more_after_clipping)])
def test_a_mistake_without_a_hint_of_its_own_is_not_given_that_of_another(number: str, answer) -> None:
    result = evaluate(number, answer, seed=0)
    assert not result.ok and result.mistake == ""


@pytest.mark.parametrize(
    ("number", "answer", "seen"),
    [
        ("3.1", type("GradientSync", (), {"__init__": Depth.__init__}), "has no method `no_sync`"),
        ("3.1", with_method("before_forward", lambda self: 1 / 0), "raised ZeroDivisionError"),
        ("3.1", with_method("after_backward", lambda self, x: None), "raised TypeError"),
        ("3.1", with_method("no_sync", lambda self: None), "the block in"),
        ("3.2", lambda mine, ranks, total: None, "gave None"),
        ("3.2", lambda mine, ranks, total: [1.0], "gave [1.0]"),
        ("3.2", lambda mine, ranks, total: total(), "raised TypeError"),
        ("3.3", lambda batches, N, micro_step, update: micro_step(batches, 1), "takes one batch"),
        ("3.4", lambda params, N, micro_step, synchronise, step, max_norm: None, "step() was called 0 times"),
    ],
)
def test_odd_answers(number: str, answer, seen: str) -> None:
    result = evaluate(number, answer, seed=0)
    assert not result.ok and seen in " ".join(row.seen for row in result.rows if not row.ok)


@pytest.mark.parametrize("number", ["3.2", "3.3", "3.4"])
def test_stubs_say_so(number: str) -> None:
    def stub(*arguments):
        raise NotImplementedError("exercise")

    with pytest.raises(CheckFailed, match=f"exercise {number} is not written yet"):
        evaluate(number, stub)


def test_a_rank_that_waits_is_found_and_not_waited_for() -> None:
    def only_large_ranks(mine, ranks, total):
        return [ranks / (total(sum(mine)) if mine[0] > 30 else 100)] * len(mine)

    result = evaluate("3.2", only_large_ranks, seed=0)
    assert result.mistake == "hangs"
    assert "waits for ever" in " ".join(row.seen for row in result.rows if not row.ok)


def test_every_mistake_does_damage_and_right_answers_do_none() -> None:
    found = damage(one_for_all, cut_first, by_hand)
    right = {*found["split"].values(), *(found[topic]["yours"] for topic in ("loss", "short", "clip"))}
    wrong = {off for topic in ("loss", "short", "clip") for name, off in found[topic].items() if name != "yours"}
    assert max(right) < 1e-5
    assert min(wrong) > 1e-3


def tiny():
    from course_lib.train import emulated

    return emulated.equal(layers=2, mb=0.01, forward_ms=1, backward_ms=2)


def test_windows_on_ranks_send_once() -> None:
    found = window_runs(tiny, Depth, (1, 3), fabric="paced", repeats=2, ddp=(3,))
    assert list(found) == ["N=1", "N=3", "DDP N=3"]
    assert found["N=1"].collectives == found["N=3"].collectives == 1
    assert all(one.from_reference < 1e-5 for one in found.values())
    assert found["N=3"].median_s > 0.009


def test_a_class_that_breaks_on_a_rank_is_one_sentence() -> None:
    with pytest.raises(OwnRunFailed, match=r"rank \d: before_forward\(\) raised ZeroDivisionError"):
        window_runs(tiny, with_method("before_forward", lambda self: 1 / 0), (2,), fabric="paced", repeats=2)
    with pytest.raises(LabError, match=r"the class of exercise 3\.1"):
        window_runs(tiny, Depth(None), (2,))


def test_the_picture_over_n() -> None:
    picture = over_n({1: (4, 0.5), 2: (4, 0.3)}, {1: (4.2, 0.52), 2: (4.1, 0.31)}, provenance="simulated")
    assert "N = 2: 4.1 ms exposed, 31% of the step" in picture.words
    assert picture.png()[:4] == b"\x89PNG"
    with pytest.raises(LabError, match="nothing was measured"):
        over_n({}, {})
