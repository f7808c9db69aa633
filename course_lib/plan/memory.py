"""Memory of one rank by part: parameters, gradients, optimizer state, activations.

Sources: Rajbhandari 2020 (ZeRO) for what is sharded at which stage; arXiv 2205.05198 (Korthikanti 2022) for
activations. Bytes everywhere; GB is 10⁹ and GiB 2³⁰ where a text names them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from course_lib.plan.shape import ModelShape
from course_lib.plan.volumes import Impossible, data_degree

PARTS = ("parameters", "gradients", "optimizer", "activations")


class Precision(NamedTuple):
    """Bytes per parameter of each kind of state. Optimizer: Adam's two moments, and a master copy where weights are
    kept in half precision."""

    parameters: int
    gradients: int
    optimizer: int


FP32 = Precision(4, 4, 8)
MIXED = Precision(2, 2, 12)
MIXED_FP32_GRADIENT = Precision(2, 4, 12)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    @property
    def largest(self) -> str:
        return max(self.parts(), key=self.parts().__getitem__)

    def parts(self) -> dict[str, int]:
        return {part: getattr(self, part) for part in PARTS}


def states(parameters: int, precision: Precision = MIXED, stage: int = 0, D: int = 1) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state on the rank with the largest part.

    Over D ranks ZeRO divides the optimizer state (stage 1), the gradients too (2), and the parameters too (3).
    """
    if stage not in (0, 1, 2, 3):
        raise Impossible(f"there is no ZeRO stage {stage!r}: choose 0, 1, 2 or 3")
    part = -(-parameters // D)
    held = [part if stage >= divided_from else parameters for divided_from in (3, 2, 1)]
    return tuple(count * size for count, size in zip(held, precision))  # type: ignore[return-value]


def layer_activation_bytes(shape: ModelShape, batch: int, *, value_bytes: int = 2, dropout: bool = True,
                           fused_attention: bool = False, tensor: int = 1, sequence_parallel: bool = False,
                           regather: bool = True, full_recompute: bool = False) -> float:
    """What one layer keeps for its backward, in bytes, for `batch` rows of `shape.length` tokens.

    With the defaults this is s·b·h·(34 + 5·a·s/h) for a GPT, and with t ranks s·b·h·(10 + 24/t + 5·a·s/(h·t)), of
    arXiv 2205.05198: 16 values a token and unit of width (4 of them not split by tensor parallelism), two
    dropout masks of a byte, and the attention scores. `fused_attention` (flash) and selective recomputation
    keep no scores; `full_recompute` keeps the layer's input alone. With sequence parallelism and `regather=False`
    the two gathered inputs of matrix products are kept whole. The Llama family keeps four values of the MLP's inner
    width, and the fp32 copy that each of its unfused norms makes.
    """
    s, h, a, t = shape.length, shape.width, shape.heads, tensor
    if full_recompute:
        return float(value_bytes * s * batch * h)
    whole = 4 * value_bytes + 2 * dropout + (8 if shape.gated else 0)
    split = value_bytes * (2 + (2 * shape.kv_width + (4 if shape.gated else 2) * shape.inner) / h)
    scores = 0.0 if fused_attention else a * s / h * (2 * value_bytes + 1 if dropout else value_bytes)
    gathered = 0 if regather else 2 * value_bytes
    unsplit = gathered + (whole - gathered) / t if sequence_parallel else whole
    return s * batch * h * (unsplit + (split + scores) / t)


def head_activation_bytes(shape: ModelShape, batch: int, *, value_bytes: int = 2, tensor: int = 1) -> float:
    """The last norm's input and output, and the scores of every token of the vocabulary that the loss keeps."""
    return shape.length * batch * value_bytes * (2 * shape.width + shape.vocab / tensor)


def per_rank(shape: ModelShape, micro_batch: int, *, gpus: int = 1, tensor: int = 1, pipeline: int = 1, stage: int = 0,
             precision: Precision = MIXED, micro_steps: int | None = None, value_bytes: int | None = None,
             dropout: bool = False, fused_attention: bool = True, sequence_parallel: bool = False,
             full_recompute: bool = False) -> Memory:
    """Memory of the fullest rank, the one on the first pipeline stage. It holds its layers, its part of the
    embedding, and, under 1F1B, the activations of min(stages, micro_steps) micro-batches.

    Not counted: buffers of collectives, fragmentation, what the runtime itself takes (on a GPU some 1 to 2 GB).
    Raises `Impossible` for degrees that do not divide what they must.
    """
    D = data_degree(gpus, tensor, pipeline)
    if shape.layers % pipeline:
        raise Impossible(f"{shape.layers} layers cannot be dealt to {pipeline} pipeline stages evenly")
    if shape.heads % tensor:
        raise Impossible(f"{shape.heads} attention heads cannot be dealt to {tensor} tensor-parallel ranks evenly")
    layers = shape.layers // pipeline
    held = -(-(layers * shape.block_parameters + shape.embedding_parameters) // tensor)
    value_bytes = precision.parameters if value_bytes is None else value_bytes
    layer = layer_activation_bytes(shape, micro_batch, value_bytes=value_bytes, dropout=dropout, tensor=tensor,
                                   fused_attention=fused_attention, sequence_parallel=sequence_parallel,
                                   full_recompute=full_recompute)
    in_flight = pipeline if micro_steps is None else min(pipeline, micro_steps)
    kept = layers * in_flight * layer
    if pipeline == 1:
        kept += head_activation_bytes(shape, micro_batch, value_bytes=value_bytes, tensor=tensor)
    return Memory(*states(held, precision, stage, D), round(kept))
