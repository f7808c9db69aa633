"""The arithmetic of each scheme, without ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from course_lib.compress import OneBit, PowerSGD, TopK, onebit, powersgd, topk, volumes
from course_lib.compress.memory import Memory

ODD = [1, 7, 8, 31, 257, 4099]


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("n", ODD)
def test_one_bit_keeps_signs_and_packs_them_as_numpy_does(n) -> None:
    x = normal(n)
    scale, signs = onebit.compress(x)
    assert scale == pytest.approx(float(x.abs().mean()))
    assert signs.numpy().tolist() == np.packbits(np.signbit(x.numpy()), bitorder="little").tolist()
    back = onebit.decompress(scale, signs, n)
    assert torch.equal(back, torch.copysign(scale, x))


def test_bits_are_packed_the_same_without_numpy() -> None:
    """The way of a GPU, on numbers that the CPU can hold."""
    class Elsewhere(torch.Tensor):
        is_cuda = True

    for n in ODD:
        x, padded = normal(n), -(-n // 32) * 32
        assert torch.equal(onebit.signs_of(x.as_subclass(Elsewhere), padded), onebit.signs_of(x, padded))


def test_one_bit_of_normal_numbers_points_where_theory_says() -> None:
    x = normal(100_000)
    back = onebit.decompress(*onebit.compress(x), len(x))
    assert float(torch.cosine_similarity(x, back, dim=0)) == pytest.approx(math.sqrt(2 / math.pi), abs=0.01)


def test_what_one_bit_says_of_a_negative_zero_is_what_its_residual_subtracts() -> None:
    x = torch.tensor([-0.0, 0.0, 3.0])
    back = onebit.decompress(*onebit.compress(x), 3)
    assert back.tolist() == [-1, 1, 1]
    (row,) = onebit._rows([x], [32], 1)
    assert torch.equal(x, torch.tensor([1.0, -1.0, 2.0])) and len(row) == 4 + 4


@pytest.mark.parametrize("n", ODD)
@pytest.mark.parametrize("k", [0.01, 0.3, 1.0])
def test_top_k_sends_the_largest_and_as_many_as_it_should(n, k) -> None:
    x = normal(n)
    values, indices = topk.compress(x, k)
    count = max(1, round(k * n))
    assert len(values) == len(indices.unique()) == count
    largest = np.sort(np.argsort(-np.abs(x.numpy()))[:count])
    assert indices.sort().values.tolist() == largest.tolist()
    back = topk.decompress(values, indices, n)
    assert torch.equal(back[indices], x[indices]) and back.count_nonzero() == count


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_top_k_sends_what_is_not_finite(bad) -> None:
    x = normal(1000)
    x[17] = bad
    assert 17 in topk.compress(x, 0.001)[1]


def test_warm_up_falls_in_equal_factors() -> None:
    shares = [topk.share_at(update, 0.001, 2) for update in range(4)]
    assert shares == pytest.approx([0.1, 0.01, 0.001, 0.001])
    assert topk.share_at(0, 0.001, 0) == 0.001


def test_power_sgd_is_exact_for_a_matrix_of_its_rank_and_finite_for_zeros() -> None:
    matrix = normal(40).view(20, 2) @ normal(66, 1).view(2, 33)
    p, q = powersgd.compress(matrix, normal(66, 2).view(33, 2))
    torch.testing.assert_close(powersgd.decompress(p, q), matrix, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(p.T @ p, torch.eye(2), rtol=0, atol=1e-5)
    assert powersgd.decompress(*powersgd.compress(torch.zeros(5, 4), torch.zeros(4, 1))).abs().max() == 0


def test_power_sgd_converges_to_the_best_of_its_rank() -> None:
    matrix, q = normal(600).view(20, 30), normal(60, 1).view(30, 2)
    for _ in range(60):
        p, q = powersgd.compress(matrix, q)
    u, s, v = np.linalg.svd(matrix.numpy(), full_matrices=False)
    best = u[:, :2] * s[:2] @ v[:2]
    error = float((matrix - powersgd.decompress(p, q)).norm())
    assert error == pytest.approx(float(np.linalg.norm(matrix.numpy() - best)), rel=1e-3)


def test_which_parameters_power_sgd_makes_thin() -> None:
    assert powersgd.factors((20, 33), 2) == (20, 33, 2)
    assert powersgd.factors((8, 3, 3, 3), 1) == (8, 27, 1)
    assert powersgd.factors((8, 3), 100) is None and powersgd.factors((4, 4), 1) is None
    assert [powersgd.factors(shape, 1) for shape in ((), (500,), (0, 3))] == [None] * 3


def test_memory_is_by_parameter_and_commits_or_does_not() -> None:
    memory, like = Memory({"a": 2, "b": 3}), torch.zeros(())
    assert memory.read(("a", "b"), like).tolist() == [0] * 5
    memory.write(("a", "b"), like).copy_(torch.arange(5.0))
    memory.discard()
    assert memory.read(("a", "b"), like).tolist() == [0] * 5
    for add in (0, 10):  # the second time in the buffer that was freed by the first
        memory.write(("a", "b"), like).copy_(torch.arange(5.0) + add)
        memory.commit()
        assert memory.read(("a", "b"), like).tolist() == [add, add + 1, add + 2, add + 3, add + 4]
    assert memory.read(("b", "a"), like).tolist() == [12, 13, 14, 10, 11]
    assert memory.read(("a",), like).tolist() == [10, 11] and memory.read(("b",), like).tolist() == [12, 13, 14]
    other = Memory({"a": 2, "b": 3})
    other.load_state_dict(memory.state_dict())
    assert other.read(("a", "b"), like).tolist() == [10, 11, 12, 13, 14]


def test_volumes_in_round_numbers() -> None:
    shapes = [(1024, 1024), (1024, 2048)]
    entries = 3 * 2**20
    for W in (2, 4, 8):
        dense = volumes.float32(shapes, W)
        assert dense == 2 * (W - 1) / W * 4 * entries
        assert volumes.half(shapes, W) == dense / 2
        assert volumes.one_bit(shapes, W) == pytest.approx(dense / 32, rel=1e-3)
        assert volumes.top_k(shapes, W, 0.01) == pytest.approx((W - 1) * 0.01 * entries * 8, rel=1e-3)
        assert volumes.power_sgd(shapes, W, 4) == 2 * (W - 1) / W * 4 * 4 * (1024 + 1024 + 1024 + 2048)
        even = volumes.top_k_crossover(W)
        assert even == 1 / W and volumes.top_k(shapes, W, even) == dense
        assert volumes.top_k_crossover(W, against_bytes=2) == 1 / (2 * W)
        assert volumes.top_k_crossover(W, entry_bytes=12) == pytest.approx(2 / (3 * W))
    assert volumes.float32(shapes, 1) == volumes.one_bit(shapes, 1) == volumes.top_k(shapes, 1, 0.5) == 0


@pytest.mark.parametrize("make, words", [
    (lambda m: TopK(m, k=0), "above 0"), (lambda m: TopK(m, k=1.01), "at most 1"),
    (lambda m: TopK(m, k=float("nan")), "above 0"), (lambda m: TopK(m, k=0.1, momentum=1.0), "momentum"),
    (lambda m: TopK(m, k=0.1, momentum=0.9, error_feedback=False), "error_feedback"),
    (lambda m: TopK(m, k=0.1, warm_up=-1), "warm_up"), (lambda m: PowerSGD(m, rank=0), "1 or more"),
    (lambda m: PowerSGD(m, rank=-2), "1 or more"), (lambda m: PowerSGD(m, rank=1.5), "whole number")])
def test_settings_that_cannot_be_are_refused(make, words) -> None:
    with pytest.raises(ValueError, match=words):
        make(nn.Linear(3, 3))


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="inside the function given to launch"):
        OneBit(nn.Linear(3, 3))


def test_one_bit_does_not_depend_on_where_in_a_bucket_a_parameter_lies() -> None:
    x, room = torch.randn(661, generator=torch.Generator().manual_seed(3)), torch.empty(800)
    scales = set()
    for offset in range(32):
        lying = room[offset:offset + len(x)]
        lying.copy_(x)
        scales.add(onebit.compress(lying)[0].item())
    assert len(scales) == 1
