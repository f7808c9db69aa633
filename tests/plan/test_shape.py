"""Models: parameters against published counts, FLOPs against published formulas, names and free forms."""

from __future__ import annotations

import pytest

from course_lib.plan import MODELS, Impossible, ModelShape, model


@pytest.mark.parametrize(
    ("name", "published"),
    [("llama-7B", 6_738_415_616), ("llama-13B", 13_015_864_320), ("llama-65B", 65_285_660_672),
     ("llama2-70B", 68_976_648_192), ("llama3-8B", 8_030_261_248), ("llama3-70B", 70_553_706_496),
     ("llama3-405B", 405_853_388_800),
     ("7B", 6_658_859_008), ("70B", 64_862_437_376), ("125M", 125_311_488)],
)  # fmt: skip
def test_parameters_as_published(name: str, published: int) -> None:
    assert MODELS[name].parameters == published


@pytest.mark.parametrize(("name", "about"), [("22B", 22e9), ("175B", 175e9), ("530B", 530e9), ("1T", 1008e9)])
def test_parameters_of_megatron_models(name: str, about: float) -> None:
    assert MODELS[name].parameters == pytest.approx(about, rel=0.01)


def test_flops_are_those_of_arxiv_2205_05198() -> None:
    """72·L·s·h²·(1 + s/(6h) + V/(12hL)) a row; biases, norms and positions are in 6N and not in the formula."""
    m = MODELS["175B"]
    h, L, s = m.width, m.layers, m.length
    assert m.flops_per_token == pytest.approx(72 * L * h * h * (1 + s / (6 * h) + m.vocab / (12 * h * L)), rel=1e-3)


def test_an_embedding_that_is_only_looked_up_counts_no_flops() -> None:
    m = model("llama-7B")
    tied = ModelShape(**{**m.__dict__, "tied": True})
    assert m.flops_per_token == tied.flops_per_token


def test_stages_hold_all_parameters() -> None:
    m = model("llama3-8B")
    inner = (m.layers // 4) * m.block_parameters
    assert m.stage_parameters(1) == m.parameters
    assert m.stage_parameters(4) == inner + (m.vocab + 1) * m.width


def test_names_and_free_forms() -> None:
    assert model("7b") == MODELS["7B"] and model("7B", 4096).length == 4096
    free = model("layers=32, width=4096, heads=32, vocab=32000, mlp=11008, gated=1, tied=0")
    assert free == MODELS["llama-7B"]


@pytest.mark.parametrize(
    ("text", "said"),
    [("8X", "there is no model '8X': choose one of"), ("layers=3", "needs width, heads, vocab as well"),
     ("layers=3,width=64,heads=4,vocab=x", "cannot read 'vocab=x'"), ("depth=3", "cannot read 'depth=3'"),
     ("layers=²,width=64,heads=4,vocab=9", "cannot read 'layers=²'"),
     (f"layers={'9' * 5000},width=64,heads=4,vocab=9", "cannot read 'layers=999"),
     ("layers=2,layers=3,width=64,heads=4,vocab=9", "layers is given twice"),
     ("layers=0,width=64,heads=4,vocab=9", "needs layers as well"),
     ("layers=2,width=64,heads=5,vocab=9", "64 cannot be dealt to 5 attention heads"),
     ("layers=2,width=64,heads=8,vocab=9,kv_heads=3", "8 heads cannot share 3 heads")],
)  # fmt: skip
def test_refusals(text: str, said: str) -> None:
    with pytest.raises(Impossible, match=said):
        model(text)


def test_rows_without_tokens_are_refused() -> None:
    with pytest.raises(Impossible, match="rows of 0 tokens"):
        model("7B", 0)
