"""Exercises 7.1 to 7.4: right answers of several kinds pass, odd ones are told what is odd; the runs on ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.lab import CheckFailed, LabError, evaluate
from course_lib.lab.pictures.lines import lines
from course_lib.lab.workbench.buckets import OwnRunFailed
from course_lib.lab.workbench.compressed import as_matrices, compressed_runs, host_costs, top_k_bytes
from course_lib.lab.workbench.gradients import flat_gradient, loss_of, without_ties
from course_lib.lab.workbench.pays import Cost, even_profile, pays_below, predicted
from course_lib.lab.workbench.race import Lap, race
from course_lib.lab.workbench.resume import resumed
from course_lib.link_cost import LinkCost
from course_lib.train import emulated
from course_lib.tune.calibrate import Load

seeds = st.integers(0, 10**6)


class InPlace:
    """Divides in the gradient's own memory."""

    def encode(self, gradient, ranks):
        return gradient.mul_(1 / ranks).half()

    def decode(self, total, ranks):
        return total.float()


class Half:
    """Divides in double precision."""

    def encode(self, gradient, ranks):
        return (gradient.double() / ranks).to(torch.float16)

    def decode(self, total, ranks):
        return torch.zeros(len(total)).copy_(total)


class OneBit:
    """Keeps one number a sign, and a tensor for the scale."""

    def __init__(self):
        self.residual = {}

    def encode(self, name, gradients):
        total = torch.stack(gradients).sum(0)
        if name in self.residual:
            total += self.residual[name]
        scale = torch.linalg.vector_norm(total, 1) / len(total)
        self.residual[name] = total - scale * torch.sign(total)
        return scale, torch.sign(total) > 0

    def decode(self, name, messages):
        return torch.stack([scale * (2.0 * positive - 1) for scale, positive in messages]).mean(0)


class Lists(OneBit):
    """Returns a plain number, adds the residual to the first micro-step, and keeps nothing under `residual`."""

    def __init__(self):
        self.left = {}

    def encode(self, name, gradients):
        gradients[0] += self.left.get(name, torch.zeros_like(gradients[0]))
        total = sum(gradients)
        scale = float(total.abs().sum()) / total.numel()
        positive = total >= 0
        self.left[name] = torch.where(positive, total - scale, total + scale)
        return [scale, positive]


class TopK:
    """Sorts, and scatters."""

    def __init__(self, k):
        self.k, self.residual = k, {}

    def encode(self, name, gradient):
        left = self.residual.setdefault(name, torch.zeros_like(gradient))
        left += gradient
        places = left.abs().argsort(descending=True)[:max(1, round(self.k * left.numel()))]
        values = left[places].clone()
        left[places] = 0
        return values, places

    def decode(self, name, messages, numel):
        return sum(torch.zeros(numel).scatter(0, places, values) for values, places in messages) / len(messages)


class SmallPlaces(TopK):
    """Sends 32-bit places in the order of the entries, and adds with index_add."""

    def encode(self, name, gradient):
        values, places = super().encode(name, gradient)
        order = places.argsort()
        return values[order], places[order].int()

    def decode(self, name, messages, numel):
        mean = torch.zeros(numel)
        for values, places in messages:
            mean.index_add_(0, places, values / len(messages))
        return mean


class ByName:
    """All ranks' residuals under (rank, name)."""

    def save(self, residuals, buckets, sizes, rank, gather):
        mine = []
        for flat, names in zip(residuals, buckets):
            start = 0
            for name in names:
                mine.append((name, flat[start : start + sizes[name]].clone()))
                start += sizes[name]
        return {(r, name): part for r, parts in enumerate(gather(mine)) for name, part in parts}

    def load(self, saved, buckets, sizes, rank):
        return [torch.cat([saved[rank, name] for name in names]) for names in buckets]


class WithBuckets:
    """Keeps the flat residuals and the buckets they lay in, and sorts it out when loading."""

    def save(self, residuals, buckets, sizes, rank, gather):
        return {"buckets": buckets, "flat": gather(residuals)}

    def load(self, saved, buckets, sizes, rank):
        parts = {}
        for flat, names in zip(saved["flat"][rank], saved["buckets"]):
            parts |= dict(zip(names, flat.split([sizes[n] for n in names])))
        return tuple(torch.cat([parts[n] for n in names]) for names in buckets)


@settings(max_examples=8, deadline=None)
@given(seeds)
@pytest.mark.parametrize(("number", "answer"), [
    ("7.1", Half), ("7.1", InPlace), ("7.2", OneBit), ("7.2", Lists), ("7.3", TopK), ("7.3", SmallPlaces),
    ("7.4", ByName), ("7.4", WithBuckets)])  # fmt: skip
def test_right_answers_pass_whatever_is_drawn(number: str, answer, seed: int) -> None:
    result = evaluate(number, answer, seed=seed)
    assert result.ok, [row for row in result.rows if not row.ok]


def changed(base, **methods):
    return type(base.__name__, (base,), methods)


@pytest.mark.parametrize(("number", "answer", "seen"), [
    ("7.1", changed(Half, encode=lambda self, g, ranks: 1 / 0), "raised ZeroDivisionError"),
    ("7.1", changed(Half, encode=lambda self, g, ranks: g[:2].half()), "torch.float16 of (2,)"),
    ("7.1", changed(Half, decode=lambda self, total, ranks: None), "gave None"),
    ("7.2", changed(OneBit, encode=lambda self, name, grads: (1.0, sum(grads).sign())), "for the signs"),
    ("7.2", changed(OneBit, encode=lambda self, name, grads: sum(grads)), "gave tensor"),
    ("7.2", changed(OneBit, decode=lambda self, name, messages: 0.0), "gave 0.0"),
    ("7.3", changed(TopK, encode=lambda self, name, g: (g, [0])), "gave (tensor"),
    ("7.3", changed(TopK, encode=lambda self, name, g: (g[:2], torch.tensor([1, 1]))), "gave (tensor"),
    ("7.4", changed(ByName, load=lambda self, *a: [torch.zeros(2)]), "gave [tensor"),
    ("7.4", changed(ByName, save=lambda self, *a: 1 / 0), "raised ZeroDivisionError")])  # fmt: skip
def test_odd_answers(number: str, answer, seen: str) -> None:
    result = evaluate(number, answer, seed=0)
    assert not result.ok and seen in " ".join(row.seen for row in result.rows if not row.ok)


def test_stubs_say_so() -> None:
    def stub(self, *arguments):
        raise NotImplementedError("exercise")

    with pytest.raises(CheckFailed, match=r"exercise 7\.4 is not written yet"):
        evaluate("7.4", changed(ByName, save=stub))


LOAD = Load("equal", 4, 0.25, 4.0, 8.0, 1.0, LinkCost(1e-4, 1e-9))


@pytest.mark.slow
def test_own_compressors_on_ranks_send_what_the_library_sends() -> None:
    own = {"half": Half, "bit": OneBit, "top": lambda: TopK(0.01)}
    found = compressed_runs(LOAD, own, fabric="paced", repeats=2, bucket_mb=0.125)
    assert found["half"].bytes == found["fp16"].bytes == found["float32"].bytes / 2
    assert found["top"].bytes == found["top 1 %"].bytes < found["bit"].bytes < found["float32"].bytes / 30
    assert found["half"].from_library == found["top"].from_library == 0
    assert found["bit"].from_library is None
    assert all(one.median_s > 0.011 and one.kernel_bytes is None for one in found.values())
    assert as_matrices(LOAD.model())[0].weights[0].shape == (128, 128)


@pytest.mark.slow
def test_gradients_of_large_layers_are_compared_without_ties() -> None:
    """Which of two equal entries travels is nobody's mistake; an emulated layer of 65 536 entries has many of them."""
    load, own = Load("equal", 2, 0.5, 1.0, 1.0, 1.0, LinkCost(1e-4, 1e-9)), {"top": lambda: TopK(0.01)}
    assert load.model()[0].weights[0].numel() == 2**16
    assert compressed_runs(load, own, fabric="loopback", repeats=2, bucket_mb=0.25)["top"].from_library == 0


def test_without_ties_every_magnitude_is_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, places = emulated.equal(layers=1, mb=0.25, forward_ms=0, backward_ms=0), []
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        with without_ties(model):
            loss_of(model, rank, 0, 1).backward()
        size = flat_gradient(model).abs()
        assert len(size.unique()) == size.numel() == 2**16
        places.append(int(size.argmax()))
        model.zero_grad()
    assert places[0] != places[1]
    loss_of(model, 0, 0, 1).backward()
    assert len(flat_gradient(model).abs().unique()) < 2**16, "an emulated gradient has ties"


@pytest.mark.parametrize("answer, said", [
    (changed(TopK, encode=lambda self, name, g: 1 / 0), r"rank \d: TopK.encode\('3\.weights\.0'"),
    pytest.param(changed(TopK, decode=lambda self, *a: 1 / 0), r"rank \d: TopK.decode\(",
                 marks=pytest.mark.slow)])  # fmt: skip
def test_a_class_that_breaks_on_a_rank_is_one_sentence(answer, said) -> None:
    with pytest.raises(OwnRunFailed, match=said):
        compressed_runs(LOAD, {"top": lambda: answer(0.1)}, fabric="loopback", repeats=2, timeout_s=20)


def test_a_restart_is_seen_unless_every_rank_has_its_own_residuals() -> None:
    found = resumed(ByName)
    assert found["yours"] == 0 < 1e-3 < min(found["rank 0's for all"], found["dropped"])
    with pytest.raises(LabError, match=r"exercise 7\.4 itself"):
        resumed(ByName())


def test_top_k_bytes_follow_the_formula() -> None:
    assert top_k_bytes((0.01, 0.5), 3) == pytest.approx([0.03, 1.5], rel=0.01)


def test_where_it_pays() -> None:
    model, plain = even_profile(4 * 2**20, 8, 0.1), Cost(1.0)
    half, slow = Cost(0.5), Cost(0.5, host_s=1.0)
    assert predicted(model, 0.1, plain).step_s > predicted(model, 0.1, half).step_s > 0.1
    assert pays_below(model, slow, plain) == 0
    assert pays_below(model, half, plain) > 100  # it costs nothing, so it never loses
    border = pays_below(model, Cost(1 / 32, host_s=5e-9, phases=2), plain)
    assert 0.1 < border < 10
    assert predicted(model, border * 0.9, Cost(1 / 32, 5e-9, 2)).step_s < predicted(model, border * 0.9, plain).step_s
    assert predicted(model, border * 1.1, Cost(1 / 32, 5e-9, 2)).step_s > predicted(model, border * 1.1, plain).step_s


def test_the_race_trains_all_alike() -> None:
    found = race({"float32": ("", {}), "again": ("", {"bucket_mb": 1}), "top": ("topk", {"k": 0.05})},
                 fabric="loopback", max_updates=4, look_every=2)  # fmt: skip
    assert found["float32"].losses == pytest.approx(found["again"].losses, abs=1e-3)
    assert found["float32"].looked == (0, 2, 4) and found["float32"].losses[-1] < found["float32"].losses[0]
    assert found["top"].bytes == pytest.approx(0.1 * found["float32"].bytes, rel=0.01)
    with pytest.raises(LabError, match="1 or more"):
        race(max_updates=0)


def test_a_lap() -> None:
    lap = Lap((1.0, 2.0, 4.0), (0, 2, 3), (5.0, 4.0, 3.0), 8.0)
    assert lap.points() == [(0.0, 5.0), (2.0, 4.0), (4.0, 3.0)]
    assert (lap.reaches(4.5), lap.reaches(1.0), lap.step_s) == (2.0, math.inf, 1.0)


def test_host_costs_are_seconds_a_byte() -> None:
    found = host_costs(numel=2**14, repeats=2)
    assert found["float32"] == 0 and all(0 < value < 1e-5 for name, value in found.items() if name != "float32")


def test_the_picture() -> None:
    picture = lines({"a": [(1, 2), (2, 3)]}, {"a": [(1.5, 2.5)]}, x="x", y="y", log="x", at=1.5, level=("one", 1))
    assert "a: 3 at 2" in picture.words and picture.png()[:4] == b"\x89PNG"
    with pytest.raises(LabError, match="nothing to draw"):
        lines({}, x="x", y="y")
