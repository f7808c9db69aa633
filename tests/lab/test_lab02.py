"""Exercises 2.1 and 2.2: right answers of several kinds pass, odd ones are told what is odd; the run on ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.lab import CheckFailed, LabError, evaluate
from course_lib.lab.exercises.lab02.replay import replay
from course_lib.lab.pictures.sliders import sliders
from course_lib.lab.workbench.buckets import OwnRunFailed
from course_lib.lab.workbench.serial import baselines


def one_by_one(params, ranks, all_reduce):
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        all_reduce(param.grad)
        param.grad /= ranks


def backwards_and_divided_first(params, ranks, all_reduce):
    for param in reversed(params):
        grad = torch.zeros_like(param.data) if param.grad is None else param.grad / ranks
        all_reduce(grad)
        param.grad = grad


def flat(params, ranks, all_reduce):
    parts = [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in params]
    buffer = torch.cat(parts)
    all_reduce(buffer)
    for param, part in zip(params, buffer.split([p.numel() for p in params])):
        param.grad = part.view_as(param) / ranks


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
@pytest.mark.parametrize("answer", [one_by_one, backwards_and_divided_first, flat])
def test_right_averages_pass_whatever_is_drawn(answer, seed: int) -> None:
    result = evaluate("2.1", answer, seed=seed)
    assert result.ok, [row for row in result.rows if not row.ok]


def ranks_in_another_order(params, ranks, all_reduce):
    for param in sorted(params, key=lambda p: 0 if p.grad is None else float(p.grad.sum())):
        one_by_one([param], ranks, all_reduce)


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        (lambda params, ranks, all_reduce: all_reduce(3), "all_reduce takes a tensor, not int"),
        (lambda params, ranks: None, "TypeError"),
        (lambda params, ranks, all_reduce: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_odd_averages(answer, seen: str) -> None:
    result = evaluate("2.1", answer, seed=0)
    assert not result.ok and seen in result.rows[0].seen


def test_an_order_that_differs_between_ranks_is_rejected() -> None:
    assert not evaluate("2.1", ranks_in_another_order, seed=0).ok


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=15)
def test_right_predictions_pass_whatever_is_drawn(seed: int) -> None:
    def answer(sizes_bytes, N, Tf_s, Tb_s, a_s, beta_s_per_byte, flat):
        parts = [sum(sizes_bytes)] if flat else sizes_bytes
        return [N * len(parts), N * sum(parts), N * sum([Tf_s, Tb_s, *(a_s + beta_s_per_byte * s for s in parts)])]

    assert evaluate("2.2", answer, seed=seed).ok


@pytest.mark.parametrize("wrong", [3, (1, 2), "abc", (None, 1, 2)])
def test_odd_predictions(wrong) -> None:
    result = evaluate("2.2", lambda *arguments: wrong, seed=0)
    assert not result.ok and "returns three numbers" in result.rows[0].name


def test_stubs_say_so() -> None:
    def stub(*arguments):
        raise NotImplementedError("exercise")

    for number in ("2.1", "2.2"):
        with pytest.raises(CheckFailed, match=f"exercise {number} is not written yet"):
            evaluate(number, stub)


def test_replay_finds_the_rank_that_waits() -> None:
    def play(rank, exchange):
        return [exchange(rank) for _ in range(2 if rank else 1)]

    one, two = replay(play, 2)
    assert not one.hangs and one.result == [[0, 1]]
    assert two.hangs and two.calls == 2


def test_sliders_return_the_picture_outside_a_notebook() -> None:
    assert sliders(lambda N: f"picture of {N}", N=(4, [1, 4])) == "picture of 4"
    with pytest.raises(LabError, match="N starts at 3"):
        sliders(lambda N: None, N=(3, [1, 4]))


def tiny():
    from course_lib.train import emulated

    return emulated.equal(layers=2, mb=0.01, forward_ms=1, backward_ms=2, parameters=2)


def test_baselines_on_ranks() -> None:
    found = baselines(tiny, one_by_one, fabric="paced", micro_steps=2, repeats=2)
    assert list(found.measured) == ["yours", "one a parameter", "flat", "DDP"]
    assert found["yours"].collectives == found["one a parameter"].collectives == 2 * 4
    assert found["flat"].collectives == 2
    assert found["flat"].bytes == found["yours"].bytes == 2 * 2 * (2**20 // 100 // 4 * 4)
    assert all(one.from_reference < 1e-5 for one in found.measured.values())


def test_a_fault_on_a_rank_is_one_sentence() -> None:
    def breaks(params, ranks, all_reduce):
        raise ValueError("so")

    with pytest.raises(OwnRunFailed, match=r"rank 0: average_gradients.* raised ValueError: so"):
        baselines(tiny, breaks, fabric="paced", micro_steps=1, repeats=2)


def test_a_slider_draws_anew_and_the_start_is_in_the_stored_notebook(monkeypatch) -> None:
    from IPython import display

    from course_lib.lab.pictures import sliders as module
    from course_lib.lab.pictures.over_n import over_n

    def draw(N):
        return over_n({}, {N: (4.0, 1 / N)})

    box = module._box(draw, draw(4), {"N": "micro-steps N"}, {"N": (4, [1, 4])})
    slider, shown = box.children
    before = shown.value
    slider.value = 1
    assert shown.value != before and "N = 1: 4.0 ms" in shown.value

    bundles = []
    monkeypatch.setattr(module, "in_notebook", lambda: True)
    monkeypatch.setattr(display, "display", lambda bundle, **options: bundles.append(bundle))
    assert sliders(draw, N=(4, [1, 4])) is None
    assert {"image/png", "text/plain", "application/vnd.jupyter.widget-view+json"} <= set(bundles[0])
