"""N, D and bytes per update: formulas against hand-worked and published numbers; refusals in words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.plan import Impossible, accumulation_steps, data_degree
from course_lib.plan import volumes as v


def test_the_configuration_of_the_course() -> None:
    assert accumulation_steps(1024, 4, 8) == 32
    assert data_degree(64, 8, 1) == data_degree(64, 2, 4) == 8
    assert accumulation_steps(1024, 4, 64) == 4
    assert accumulation_steps(np.int64(1024), 4, 8) == 32


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_what_divides_gives_it_back(N: int, b: int, D: int) -> None:
    assert accumulation_steps(N * b * D, b, D) == N


@given(st.integers(-5, 200), st.integers(-2, 20), st.integers(-2, 20))
def test_every_other_combination_is_refused_in_words(B: int, b: int, D: int) -> None:
    possible = min(B, b, D) >= 1 and B % (b * D) == 0
    try:
        assert accumulation_steps(B, b, D) * b * D == B and possible
    except Impossible as refusal:
        assert not possible and len(str(refusal)) > 30


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((1000, 4, 8), "31 micro-steps leave 8 samples out and 32 need 1024. Choose B = 992 or 1024"),
        ((16, 4, 8), "one micro-step alone takes b·D = 4·8 = 32 samples"),
        ((1024, 0, 8), "b = 0: the micro-batch is 1 at least"),
        ((1024, 4, -8), "D = -8: the data-parallel degree is 1 at least"),
        ((1024, 2.5, 8), "b = 2.5: the micro-batch is a whole number"),
        ((1024.0, 4, 8), "B = 1024.0"),
        ((1024, True, 8), "b = True"),
        (("1024", 4, 8), "B = '1024'"),
        ((1024, None, 8), "b = None"),
    ],
)
def test_refusals(arguments: tuple, said: str) -> None:
    with pytest.raises(Impossible, match=said.replace("(", r"\(").replace("+", r"\+")):
        accumulation_steps(*arguments)


def test_gpus_that_do_not_divide() -> None:
    with pytest.raises(Impossible, match="4 would stand idle"):
        data_degree(64, 6, 2)
    with pytest.raises(Impossible, match="takes 8·1 = 8 GPUs, and there are 4"):
        data_degree(4, 8)


def test_data_parallel() -> None:
    G = 8e9
    assert v.data_parallel_bytes(G, 8) == 2 * 7 / 8 * G
    assert v.data_parallel_bytes(G, 8, 32) == v.data_parallel_bytes(G, 8, 32, stage=1) == 2 * 7 / 8 * G
    assert v.data_parallel_bytes(G, 8, 32, every_micro_step=True) == 32 * 2 * 7 / 8 * G
    assert v.data_parallel_bytes(G, 8, 1, stage=2) == v.data_parallel_bytes(G, 8)
    assert v.data_parallel_bytes(G, 8, 3, stage=2) == 2 * v.data_parallel_bytes(G, 8)
    assert v.data_parallel_bytes(G, 8, 1, stage=3) == 1.5 * v.data_parallel_bytes(G, 8)
    assert v.data_parallel_bytes(G, 8, 8, stage=3) == 12 * v.data_parallel_bytes(G, 8)
    assert v.data_parallel_bytes(G, 1, 4, stage=3) == 0


def test_the_volume_named_in_the_claims() -> None:
    """TP8·DP8, 7B in bf16, 2.95 GB a GPU once and 94 GB in every one of 32 micro-steps."""
    G = 2 * 6.74e9 / 8
    assert v.data_parallel_bytes(G, 8) == pytest.approx(2.95e9, rel=0.01)
    assert v.data_parallel_bytes(G, 8, 32, every_micro_step=True) == pytest.approx(94e9, rel=0.01)


def test_model_parallel() -> None:
    A = 4 * 2048 * 4096 * 2
    assert v.tensor_parallel_bytes(A, 8, layers=32, N=32) == 32 * 32 * 4 * 2 * 7 / 8 * A
    assert v.tensor_parallel_bytes(A, 1, layers=32, N=32) == 0
    assert v.pipeline_parallel_bytes(A, 4, N=32) == 64 * A
    assert v.pipeline_parallel_bytes(A, 4, N=32, interleaved=2) == 128 * A
    assert v.pipeline_parallel_bytes(A, 1, N=32) == 0
    assert v.expert_parallel_bytes(A, 8, layers=16, N=2, experts_per_token=2) == 16 * 2 * 2 * 4 * 7 / 8 * A


@pytest.mark.parametrize("call", [
    lambda: v.data_parallel_bytes(1, 8, stage=4), lambda: v.data_parallel_bytes(1, 0),
    lambda: v.data_parallel_bytes(1, 8, 0), lambda: v.tensor_parallel_bytes(1, 8, 4, 0),
    lambda: v.pipeline_parallel_bytes(1, 0, 4), lambda: v.expert_parallel_bytes(1, 8, 4, 4, experts_per_token=0),
])  # fmt: skip
def test_impossible_degrees(call) -> None:
    with pytest.raises(Impossible):
        call()
