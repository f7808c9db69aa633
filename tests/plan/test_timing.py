"""Step time: hand-worked operations, the parts that must add up, and what must never make a step slower."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.plan import GPUS, Cluster, Impossible, Layout, cluster, model, step
from course_lib.plan.compute import LOGIT_BYTES, head, layer, product
from course_lib.plan.hardware import Efficiency
from course_lib.plan.layout import split
from course_lib.plan.timing import INTERFERENCE
from course_lib.plan.volumes import all_reduce_bytes, data_parallel_bytes

A100 = cluster("a100-80", 64)
SEVEN = model("7B")


def test_a_product_pays_for_flops_and_for_bytes() -> None:
    gpu = replace(GPUS["a100-80"], flops=1e12, bandwidth=1e9, efficiency=Efficiency(0.5, 0.25, 1, 1))
    one = product(100, 200, 300)
    assert (one.matmul, one.bytes) == (2 * 100 * 200 * 300, 2 * (100 * 200 + 200 * 300 + 100 * 300))
    assert one.seconds(gpu) == pytest.approx(one.matmul / 0.5e12 + one.bytes / 0.25e9)


@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize("name", ["7B", "llama3-8B"])
def test_flops_of_all_layers_are_those_of_the_model(name: str, t: int) -> None:
    """Matrix products and attention, forward and backward, on t ranks: 6 a parameter of a matrix and 12·L·h·s."""
    m, layout = model(name), Layout(t, micro_batch=2)
    forward, backward = layer(m, layout)
    tokens = 2 * m.length
    matrices = 6 * m.block_matrices * tokens
    assert t * (forward.matmul + backward.matmul) == pytest.approx(matrices)
    assert t * forward.attention == pytest.approx(4 * m.length * m.width * tokens)
    one, back = head(m, layout)
    assert t * (one.matmul + back.matmul) == pytest.approx(6 * m.vocab * m.width * tokens)


def test_unfused_attention_moves_the_scores() -> None:
    m = model("22B")
    fused, unfused = (layer(m, Layout(8, micro_batch=4, fused=f))[0] for f in (True, False))
    scores = 4 * m.heads / 8 * m.length**2
    assert unfused.bytes - fused.bytes > 8 * scores
    assert unfused.matmul - fused.matmul == pytest.approx(fused.attention)


def test_recomputation_repeats_the_forward() -> None:
    none, full, half = (layer(SEVEN, Layout(recompute=r)) for r in ("none", "full", "alternate"))
    assert full[1].matmul == none[1].matmul + none[0].matmul and full[1].bytes == none[1].bytes + none[0].bytes
    assert none[1].matmul < half[1].matmul < full[1].matmul


def test_sequence_parallelism_splits_the_norms() -> None:
    whole, split_up = (layer(SEVEN, Layout(8, sequence=s))[0].bytes for s in (False, True))
    assert split_up < whole


def test_parts_add_up() -> None:
    s = step(SEVEN, A100, Layout(4, 2, 4, stage=1), 1024)
    assert s.total == pytest.approx(sum(s.parts().values()))
    assert (s.D, s.N, s.tokens) == (8, 32, 1024 * 2048)
    assert s.tokens_per_s == s.tokens / s.total
    assert s.mfu(SEVEN, A100) == pytest.approx(SEVEN.flops_per_token * s.tokens / s.total / (64 * 312e12))


def test_the_bubble_is_p_minus_1_over_v_m_of_the_ideal_time() -> None:
    free = replace(A100, hop_s=0.0, network_hop_s=0.0, gpu=replace(A100.gpu, nvlink=1e18, network=1e18))
    small = replace(SEVEN, vocab=1)  # no head that makes the last stage slower
    for v in (1, 4):
        s = step(small, free, Layout(1, 8, 1, v), 512)
        assert s.bubble / s.compute == pytest.approx(7 / (v * s.N), rel=1e-3)


def test_one_gpu_sends_nothing() -> None:
    s = step(model("125M"), cluster("h100", 1), Layout(micro_batch=8), 64)
    assert s.tensor == s.pipeline == s.data == s.bubble == 0 and s.N == 8


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_exposed_without_overlap_is_what_is_sent(stage: int) -> None:
    """With latencies of zero, seconds are bytes over bandwidth, and bytes those of `volumes`."""
    quiet = replace(A100, hop_s=0.0, network_hop_s=0.0)
    s = step(SEVEN, quiet, Layout(1, 1, 4, stage=stage, overlap=False), 1024)
    sent = data_parallel_bytes(2 * SEVEN.parameters, 64, s.N, stage=stage)
    rate = min(A100.gpu.nvlink, 8 * A100.gpu.network) * A100.gpu.efficiency.link
    assert s.data == pytest.approx(sent / rate)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_overlap_hides_but_not_all(stage: int) -> None:
    hidden, all_of_it = (step(SEVEN, A100, Layout(1, 1, 4, stage=stage, overlap=o), 1024).data for o in (True, False))
    assert INTERFERENCE * all_of_it <= hidden < 0.2 * all_of_it


def test_tensor_parallel_traffic_of_forward() -> None:
    quiet = replace(A100, hop_s=0.0)
    s = step(SEVEN, quiet, Layout(8, 1, 4, sequence=False, overlap=False), 1024)
    A = 2 * 4 * 2048 * 4096
    seconds = 4 * 32 * s.N * all_reduce_bytes(A, 8) / (300e9 * A100.gpu.efficiency.link)
    assert s.tensor == pytest.approx(seconds)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]),
       st.integers(0, 3), st.booleans(), st.sampled_from(["flops", "bandwidth", "nvlink", "network"]))
def test_faster_hardware_never_makes_a_step_slower(t, p, b, stage, overlap, what) -> None:
    layout = Layout(t, p, b, stage=stage, overlap=overlap)
    faster = replace(A100, gpu=replace(A100.gpu, **{what: 2 * getattr(A100.gpu, what)}))
    here, there = (step(SEVEN, where, layout, 1024) for where in (A100, faster))
    assert there.total <= here.total * (1 + 1e-12)
    assert min(here.parts().values()) >= 0


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 5), st.integers(1, 6), st.integers(1, 300))
def test_a_layout_is_whole_or_refused_in_words(t, p, v, b, B) -> None:
    try:
        D, N = split(Layout(t, p, b, v), SEVEN, 64, B)
    except Impossible as refusal:
        assert len(str(refusal)) > 30
    else:
        assert t * p * D == 64 and N * b * D == B and 32 % t == 0 and 32 % (p * v) == 0


@pytest.mark.parametrize(
    ("layout", "B", "said"),
    [(Layout(3), 64, "64 GPUs are not a multiple"), (Layout(64), 64, "32 attention heads cannot be dealt to 64"),
     (Layout(1, 64), 64, "32 layers cannot be dealt to 64 pipeline stages"),
     (Layout(1, 8, interleaved=3), 64, "32 layers cannot be dealt to 8 pipeline stages of 3 parts"),
     (Layout(interleaved=2), 64, "nothing to interleave"), (Layout(1, 4, 1, 2), 32, "no multiple of 4"),
     (Layout(micro_batch=3), 1024, "not a multiple of b·D"), (Layout(stage=4), 64, "no ZeRO stage 4"),
     (Layout(recompute="some"), 64, "no recomputation 'some'")],
)  # fmt: skip
def test_refusals(layout: Layout, B: int, said: str) -> None:
    with pytest.raises(Impossible, match=said):
        step(SEVEN, A100, layout, B)


def test_heads_of_keys_and_values_limit_tensor_parallelism() -> None:
    with pytest.raises(Impossible, match="8 heads of keys and values cannot be dealt to 16"):
        step(model("llama3-8B"), A100, Layout(16), 64)


@pytest.mark.parametrize(
    ("gpus", "node", "said"), [(60, 8, "4 are left over"), (0, 8, "1 at least"), (8, 0, "1 at least")]
)
def test_clusters_that_cannot_be(gpus: int, node: int, said: str) -> None:
    with pytest.raises(Impossible, match=said):
        Cluster(GPUS["h100"], gpus, node)


def test_unknown_gpu() -> None:
    with pytest.raises(Impossible, match="choose one of a100-40"):
        cluster("v100", 8)


def test_the_loss_counts() -> None:
    m = model("125M")
    forward, backward = head(m, Layout(micro_batch=1))
    assert forward.bytes + backward.bytes > LOGIT_BYTES * m.length * m.vocab


def test_some_stages_send_between_nodes_wherever_there_are_several() -> None:
    """Stages of 4 GPUs, two a node: every second boundary is one between nodes, and the slowest sets the pace."""
    layout, slow = Layout(1, 16, 1), cluster("a100-80", 64, network_gb=1e-3)
    assert step(SEVEN, slow, layout, 64).pipeline > 1000 * step(SEVEN, A100, layout, 64).pipeline
    one_node = [cluster("a100-80", 8, network_gb=rate) for rate in (1e-3, 25)]
    assert len({step(SEVEN, where, Layout(1, 8, 1), 64).total for where in one_node}) == 1
