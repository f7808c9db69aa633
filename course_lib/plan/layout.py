"""How a run is laid out over GPUs: degrees of parallelism, micro-batch, ZeRO stage, recomputation."""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.plan.shape import ModelShape
from course_lib.plan.volumes import Impossible, accumulation_steps, data_degree

RECOMPUTE = ("none", "selective", "alternate", "full")
"""What backward computes again. `selective`: the attention scores (fused attention does so by itself). `alternate`:
every second matrix product, and everything but matrix products and attention (torchtitan's "selective op"). `full`:
the whole layer, of which only the input is kept."""


@dataclass(frozen=True)
class Layout:
    """`tensor`·`pipeline`·D GPUs. `interleaved`: parts of the model on each stage (v). `stage`: of ZeRO.

    `sequence`: the norms' activations are split over the tensor-parallel ranks too (arXiv 2205.05198). `fused`: one
    attention kernel that never writes the scores (flash attention). `overlap`: gradients are reduced under backward,
    and what tensor parallelism sends in backward runs under its products.
    `fp32_gradients`: gradients are kept in fp32 where weights are bf16, 18 bytes a parameter in all instead of 16.
    `regather`: under sequence parallelism, the gathered inputs of a layer's matrices are dropped after forward and
    gathered again (Megatron); False keeps them whole.
    """

    tensor: int = 1
    pipeline: int = 1
    micro_batch: int = 1
    interleaved: int = 1
    stage: int = 0
    recompute: str = "none"
    sequence: bool = True
    fused: bool = True
    overlap: bool = True
    fp32_gradients: bool = False
    dropout: bool = False
    regather: bool = True

    def __str__(self) -> str:
        parts = [f"TP{self.tensor}", f"PP{self.pipeline}"]
        parts += [f"v{self.interleaved}"] * (self.interleaved > 1) + [f"ZeRO-{self.stage}"] * (self.stage > 0)
        parts += [f"recompute {self.recompute}"] * (self.recompute != "none")
        return "·".join(parts[:2]) + "".join(f" {p}" for p in parts[2:]) + f" b{self.micro_batch}"


def split(layout: Layout, shape: ModelShape, gpus: int, B: int) -> tuple[int, int]:
    """(D, N): the data-parallel degree and the micro-steps of an update of `B` rows. Raises `Impossible`, in words, for
    degrees that do not divide what they must."""
    t, p, v = layout.tensor, layout.pipeline, layout.interleaved
    D = data_degree(gpus, t, p)
    if layout.recompute not in RECOMPUTE:
        raise Impossible(f"there is no recomputation {layout.recompute!r}: choose one of {', '.join(RECOMPUTE)}")
    if layout.stage not in (0, 1, 2, 3):
        raise Impossible(f"there is no ZeRO stage {layout.stage!r}: choose 0, 1, 2 or 3")
    if shape.heads % t:
        raise Impossible(f"{shape.heads} attention heads cannot be dealt to {t} tensor-parallel ranks evenly")
    if (shape.kv_heads or shape.heads) % t:
        raise Impossible(f"{shape.kv_heads} heads of keys and values cannot be dealt to {t} tensor-parallel ranks "
                         "evenly")
    if shape.layers % (p * v):
        parts = f"{p} pipeline stages" + (f" of {v} parts" if v > 1 else "")
        raise Impossible(f"{shape.layers} layers cannot be dealt to {parts} evenly")
    if v > 1 and p == 1:
        raise Impossible(f"{v} parts a stage need a pipeline: with one stage there is nothing to interleave")
    N = accumulation_steps(B, layout.micro_batch, D)
    if v > 1 and N % p:
        raise Impossible(f"interleaving needs rounds of {p} micro-steps, and N = {N} is no multiple of {p}")
    return D, N
