"""Memory by part of a layout: what is held, what is kept, what comes and goes, and what does not fit."""

from __future__ import annotations

import pytest

from course_lib.plan import Layout, cluster, model, per_rank
from course_lib.plan.footprint import RUNTIME, Footprint, footprint, layer_bytes, why_not

SEVEN = model("7B")


def of(layout: Layout, N: int = 8, D: int = 8, shape=SEVEN) -> Footprint:
    return footprint(shape, layout, D, N)


def test_parts_add_up() -> None:
    f = of(Layout(2, 2, 1, stage=1))
    assert f.total == sum(f.parts().values()) and set(f.parts()) == {
        "parameters", "gradients", "optimizer", "activations", "working"}
    assert f.largest == max(f.parts(), key=f.parts().get)


@pytest.mark.parametrize("layout", [Layout(), Layout(4, 1, 2, sequence=False), Layout(2, 4, 1, stage=1)])
def test_as_per_rank_says(layout: Layout) -> None:
    """The planner and the formula of lab 01 agree where both look."""
    D = 64 // layout.tensor // layout.pipeline
    book = per_rank(SEVEN, layout.micro_batch, gpus=64, tensor=layout.tensor, pipeline=layout.pipeline,
                    stage=layout.stage, micro_steps=8, sequence_parallel=layout.sequence)
    mine = of(layout, D=D)
    assert [mine.parameters, mine.gradients, mine.optimizer] == [book.parameters, book.gradients, book.optimizer]
    assert mine.activations == pytest.approx(book.activations)


def test_each_zero_stage_holds_less() -> None:
    totals = [of(Layout(stage=z), D=64) for z in range(4)]
    states = [f.parameters + f.gradients + f.optimizer for f in totals]
    assert states == sorted(states, reverse=True) and len(set(states)) == 4
    assert totals[3].working > totals[0].working  # gathered layers come and go


def test_fp32_gradients_make_18_bytes() -> None:
    f = of(Layout(fp32_gradients=True))
    assert f.parameters + f.gradients + f.optimizer == 18 * SEVEN.parameters


def test_recomputation_keeps_less() -> None:
    kept = [of(Layout(micro_batch=4, recompute=r)).activations for r in ("none", "alternate", "full")]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 3
    unfused = [of(Layout(micro_batch=4, recompute=r, fused=False, dropout=True)).activations
               for r in ("none", "selective")]
    assert unfused[0] > 2 * unfused[1]


def test_pipelines_keep_min_p_n_micro_batches() -> None:
    one = 8 * layer_bytes(SEVEN, Layout(1, 4), "none")
    assert of(Layout(1, 4), N=8).activations == pytest.approx(4 * one)
    assert of(Layout(1, 4), N=2).activations == pytest.approx(2 * one)
    assert of(Layout(1, 4, 1, 2), N=8).activations == pytest.approx(4 * one * (1 + 3 / 8))


def test_the_last_stage_decides_where_the_vocabulary_is_large() -> None:
    m = model("layers=4,width=256,heads=4,vocab=200000")
    assert of(Layout(1, 2, 8), N=2, shape=m).working >= 12 * 8 * m.length * m.vocab


def test_gathered_inputs_that_are_kept() -> None:
    kept, dropped = (layer_bytes(SEVEN, Layout(8, regather=r), "none") for r in (False, True))
    assert kept - dropped == 4 * SEVEN.length * SEVEN.width * 7 / 8


def test_what_does_not_fit_says_what_and_what_would_help() -> None:
    where, layout = cluster("a100-80", 64), Layout(micro_batch=4)
    said = why_not(of(layout, D=64), where, layout)
    assert "of 78.0" in said and "optimizer is the largest part" in said and "a higher ZeRO stage would help" in said
    wide = Layout(micro_batch=16, stage=3)
    assert "recomputation would help" in why_not(of(wide, D=64), where, wide)
    small = Layout(micro_batch=1, stage=3)
    assert why_not(of(small, D=64), where, small) == ""
    assert of(small, D=64).total <= where.gpu.memory - RUNTIME
