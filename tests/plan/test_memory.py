"""Memory by part: against a real model, and against published tables."""

from __future__ import annotations

import subprocess
import sys

import pytest

from course_lib.plan import FP32, MIXED, MIXED_FP32_GRADIENT, Impossible, Memory, ModelShape, per_rank
from course_lib.plan.memory import layer_activation_bytes, states

GIB = 2**30


def shape(layers: int, width: int, heads: int) -> ModelShape:
    return ModelShape(layers, width, heads, vocab=51200, length=2048)


def test_no_torch() -> None:
    code = "import sys, course_lib.plan; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_of_the_courses_gpt(tied: bool) -> None:
    from course_lib.train.gpt import GPT, GPTConfig

    config = GPTConfig(layers=3, width=64, heads=4, length=32, tied=tied)
    counted = sum(p.numel() for p in GPT(config).parameters())
    assert ModelShape(3, 64, 4, config.vocab, 32, tied).parameters == counted


def test_activations_of_the_courses_gpt() -> None:
    import torch

    from course_lib.train.gpt import GPT, GPTConfig, next_byte_loss

    config = GPTConfig(layers=2, width=64, length=32)
    model, kept = GPT(config), {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.zeros(8, 32, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, _ = next_byte_loss(model, (tokens, tokens))
    formula = per_rank(ModelShape(2, 64, 4, config.vocab, 32), 8, precision=FP32)
    assert loss.requires_grad
    assert sum(kept.values()) == pytest.approx(formula.activations, rel=0.05)


@pytest.mark.parametrize(
    ("precision", "stage", "basis"),
    [
        (MIXED, 0, lambda d: 16), (MIXED, 1, lambda d: 4 + 12 / d), (MIXED, 2, lambda d: 2 + 14 / d),
        (MIXED, 3, lambda d: 16 / d), (MIXED_FP32_GRADIENT, 0, lambda d: 18),
        (MIXED_FP32_GRADIENT, 1, lambda d: 6 + 12 / d),
    ],
)  # fmt: skip
@pytest.mark.parametrize("D", [1, 8, 64])
def test_bytes_per_parameter(precision, stage: int, basis, D: int) -> None:
    assert sum(states(64 * 10**6, precision, stage, D)) == pytest.approx(64e6 * basis(D))


def test_an_uneven_shard_is_rounded_up() -> None:
    assert states(10, FP32, 3, 4) == (12, 12, 24)


@pytest.mark.parametrize(
    ("model", "batch", "factor", "plain", "selective"),
    [(shape(48, 6144, 64), 4, 1.0, 59.25, 9.56), (shape(96, 12288, 96), 1, 1 + 7 / 24, 66.84, 12.35)],
)
def test_activations_of_arxiv_2205_05198(model, batch, factor, plain, selective) -> None:
    """Figures for 22B and 175B with t = 8; the second interleaved on 8 stages of 3 parts."""
    without = layer_activation_bytes(model, batch, tensor=8) * model.layers * factor / GIB
    with_both = layer_activation_bytes(model, batch, tensor=8, sequence_parallel=True, fused_attention=True)
    assert without == pytest.approx(plain, rel=0.002)
    assert with_both * model.layers * factor / GIB == pytest.approx(selective, rel=0.002)


def test_the_formula_of_the_paper() -> None:
    m = shape(1, 1024, 16)
    assert layer_activation_bytes(m, 2) == 2048 * 2 * 1024 * (34 + 5 * 16 * 2048 / 1024)
    assert layer_activation_bytes(m, 2, full_recompute=True) == 2 * 2048 * 2 * 1024


def test_a_7b_model_on_one_gpu_does_not_fit_because_of_its_optimizer() -> None:
    seven = ModelShape(32, 4096, 32, 32000, 2048, tied=False)
    assert seven.parameters == pytest.approx(6.7e9, rel=0.01)
    one = per_rank(seven, 4)
    assert one.largest == "optimizer" and one.optimizer > 80e9 > one.gradients == one.parameters
    assert per_rank(seven, 4, gpus=64, stage=1).total < 80e9 < per_rank(seven, 4, gpus=64).total


def test_pipeline_keeps_as_many_micro_batches_as_stages() -> None:
    m = shape(32, 1024, 16)
    one, four = per_rank(m, 2), per_rank(m, 2, gpus=4, pipeline=4)
    few = per_rank(m, 2, gpus=4, pipeline=4, micro_steps=1)
    assert four.activations == 4 * few.activations
    assert one.activations > four.activations > 0.8 * one.activations  # the head is on another stage
    assert four.parameters < one.parameters / 2


@pytest.mark.parametrize("options", [{"gpus": 8, "pipeline": 5}, {"gpus": 10, "pipeline": 5}, {"gpus": 6, "tensor": 3},
                                     {"stage": 5}])  # fmt: skip
def test_impossible(options: dict) -> None:
    with pytest.raises(Impossible):
        per_rank(shape(32, 1024, 16), 1, **options)


def test_memory_adds_up() -> None:
    assert Memory(1, 2, 3, 4).total == 10 and Memory(1, 2, 3, 4).largest == "activations"
