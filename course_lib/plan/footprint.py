"""Memory of the fullest GPU of a layout by part, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.plan.hardware import GIB, Cluster
from course_lib.plan.layout import Layout
from course_lib.plan.memory import (
    MIXED,
    MIXED_FP32_GRADIENT,
    Memory,
    head_activation_bytes,
    layer_activation_bytes,
    states,
)
from course_lib.plan.shape import ModelShape

RUNTIME = 2 * GIB
"""Left for the CUDA context, collectives' buffers and fragmentation when asking what fits."""
LOSS_BYTES = 12
"""Per logit, while the loss is computed in fp32: the logits, their log-softmax, and the gradient."""


@dataclass(frozen=True)
class Footprint(Memory):
    """Bytes of one GPU. `working` comes and goes within a step: the loss, the layer that is being computed, gathered
    weights and gradients that are not yet scattered."""

    working: int = 0

    def parts(self) -> dict[str, int]:
        return super().parts() | {"working": self.working}


def footprint(shape: ModelShape, layout: Layout, D: int, N: int) -> Footprint:
    """The fullest GPU: of the first stage, which holds activations of min(p, N) micro-batches under 1F1B, or
    (1 + (p−1)/(p·v)) times as many interleaved (arXiv 2104.04473, 2205.05198), or of the last, which holds one and
    computes the loss."""
    t, p, v = layout.tensor, layout.pipeline, layout.interleaved
    layers = shape.layers // p
    held = -(-shape.stage_parameters(p) // t)
    kept = layer_bytes(shape, layout, layout.recompute)
    in_flight = p * (1 + (p - 1) / (p * v) if v > 1 else 1)
    head = head_activation_bytes(shape, layout.micro_batch, tensor=t)
    loss = LOSS_BYTES * layout.micro_batch * shape.length * shape.vocab / t
    computing = layer_bytes(shape, layout, "none" if layout.fused else "selective")
    first, last = layers * kept * min(in_flight, N), layers * kept + head
    if p == 1 or last + loss > first:
        activations, working = last, max(loss, computing)
    else:
        activations, working = first, computing
    precision = MIXED_FP32_GRADIENT if layout.fp32_gradients else MIXED
    return Footprint(*states(held, precision, layout.stage, D), round(activations),
                     round(working + _whole_copies(shape, layout, precision.gradients)))


def layer_bytes(shape: ModelShape, layout: Layout, recompute: str) -> float:
    """What a layer keeps for its backward under `recompute`."""
    t, b, tokens, h = layout.tensor, layout.micro_batch, layout.micro_batch * shape.length, shape.width
    if recompute == "alternate":
        # Its input, attention's output, and every second product's output.
        split = 1 + (h + 2 * shape.kv_width + (2 if shape.gated else 1) * shape.inner) / (2 * h)
        return 2 * tokens * h * ((1 + 1) / (t if layout.sequence else 1) + split / t)
    return layer_activation_bytes(
        shape, b, dropout=layout.dropout, fused_attention=layout.fused or recompute == "selective", tensor=t,
        sequence_parallel=layout.sequence, regather=layout.regather, full_recompute=recompute == "full")


def _whole_copies(shape: ModelShape, layout: Layout, gradient_bytes: int) -> float:
    """Weights of two layers that are gathered (ZeRO-3), and the gradient of one that is not yet scattered (2 and 3).
    The embedding and the output matrix count as layers; the largest decides."""
    largest = max(shape.block_parameters, shape.vocab * shape.width) / layout.tensor
    return {2: gradient_bytes * largest, 3: (2 * 2 + gradient_bytes) * largest}.get(layout.stage, 0.0)


def usable(cluster: Cluster) -> float:
    """Bytes of a GPU that a layout may take."""
    return cluster.gpu.memory - RUNTIME


def why_not(found: Footprint, cluster: Cluster, layout: Layout) -> str:
    """"" if it fits the GPU, else a sentence: how much is missing, what takes most, and what would help."""
    limit = usable(cluster)
    if found.total <= limit:
        return ""
    sizes = ", ".join(f"{part} {size / GIB:.1f}" for part, size in found.parts().items())
    if found.largest in ("activations", "working"):
        helps = "a smaller micro-batch, more tensor parallelism" + (" or recomputation" * (layout.recompute != "full"))
    else:
        helps = "more tensor or pipeline parallelism" + (" or a higher ZeRO stage" * (layout.stage < 3))
    return (f"needs {found.total / GIB:.1f} GiB of {limit / GIB:.1f} ({sizes}); {found.largest} is the largest part: "
            f"{helps} would help")
