"""Seconds of one GPU's work for one micro-batch: an operation pays for its FLOPs, and for the bytes it moves.

A matrix product of m×k by k×n takes 2mkn FLOPs at the GPU's rate *plus* (mk + kn + mn) values through memory. The
sum, not the larger of the two, makes small or thin products slower than large ones without a constant for each
shape. Everything else (norms, activations, residuals, softmax, loss, optimizer) is memory traffic alone. Bytes are
counted a value of 2 (bf16) from what an unfused PyTorch operation reads and writes.
"""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.plan.hardware import GPU
from course_lib.plan.layout import Layout
from course_lib.plan.shape import ModelShape

VALUE = 2
LOGIT_BYTES = 34.0
"""Traffic of one logit in forward and backward: the product writes it in bf16 (2), it is converted to fp32 (6), its
log-softmax taken (8), and backward does the same the other way (8 + 6) and feeds two products (4)."""
OPTIMIZER_BYTES = 46.0
"""Adam on one parameter: gradient, master weight and both moments are read (16), the last three written (12), and
the bf16 weight written (2)."""


@dataclass(frozen=True)
class Amount:
    """What a piece of work consists of: FLOPs of matrix products, FLOPs of fused attention, bytes through memory."""

    matmul: float = 0.0
    attention: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.matmul + other.matmul, self.attention + other.attention, self.bytes + other.bytes)

    def times(self, count: float) -> Amount:
        return Amount(count * self.matmul, count * self.attention, count * self.bytes)

    def seconds(self, gpu: GPU) -> float:
        e = gpu.efficiency
        return (self.matmul / (e.matmul * gpu.flops) + self.attention / (e.attention * gpu.flops)
                + self.bytes / (e.memory * gpu.bandwidth))


def product(m: float, k: float, n: float, count: float = 1.0) -> Amount:
    """`count` products of an m×k by a k×n matrix."""
    return Amount(matmul=2 * m * k * n, bytes=VALUE * (m * k + k * n + m * n)).times(count)


def attention(shape: ModelShape, layout: Layout) -> tuple[Amount, Amount]:
    """Forward and backward of the core of attention in one layer: QKᵀ, softmax, dropout, and the product with V."""
    s, heads, depth = shape.length, shape.heads / layout.tensor, shape.width / shape.heads
    rows = layout.micro_batch * heads
    if layout.fused:
        both = 4 * rows * s * s * depth
        return Amount(attention=both), Amount(attention=2.5 * both)  # backward computes the scores again
    dropped = (5, 5) if layout.dropout else (0, 0)  # read 2, write 2, and a mask of a byte
    scores = rows * s * s
    products = product(s, depth, s, rows) + product(s, s, depth, rows)
    forward = products + Amount(bytes=scores * (4 + dropped[0]))  # softmax reads 2 and writes 2
    backward = products.times(2) + Amount(bytes=scores * (6 + dropped[1]))
    return forward, backward


def layer(shape: ModelShape, layout: Layout) -> tuple[Amount, Amount]:
    """Forward and backward of one layer on one tensor-parallel rank, with the recomputation that the layout asks for in
    backward."""
    t, h, kv, m = layout.tensor, shape.width, shape.kv_width, shape.inner
    tokens = layout.micro_batch * shape.length
    ups = 2 if shape.gated else 1
    products = (product(tokens, h, (h + 2 * kv) / t) + product(tokens, h / t, h)
                + product(tokens, h, m / t, ups) + product(tokens, m / t, h))
    whole = tokens * h / (t if layout.sequence else 1)
    inner = tokens * m / t
    rest = _llama_rest(whole, tokens * (h + kv) / t, inner) if shape.gated else _gpt_rest(whole, inner, layout.dropout)
    if not shape.gated:  # the gradient of a bias reads the gradient of its output once more
        rest = rest[0], rest[1] + VALUE * tokens * (2 * h + (h + 2 * kv + m) / t)
    forward, backward = Amount(bytes=rest[0]), Amount(bytes=rest[1])
    core_forward, core_backward = attention(shape, layout)
    forward = forward + products + core_forward
    backward = backward + products.times(2) + core_backward
    if layout.recompute == "full":
        backward = backward + forward
    elif layout.recompute == "alternate":
        backward = backward + products.times(0.5) + Amount(bytes=rest[0])
    elif layout.recompute == "selective" and not layout.fused:
        backward = backward + core_forward
    return forward, backward


def _gpt_rest(whole: float, inner: float, dropout: bool) -> tuple[float, float]:
    """Bytes of everything but products and attention, forward and backward. Two norms (read 2, write 2; backward reads
    4, writes 2), two residual sums (6, and 6 for their gradients), and with dropout, which is fused with the sum, a
    mask (1 written; backward reads it, reads 2 and writes 2). GELU reads and writes, and in backward reads two."""
    return whole * (20 + 2 * dropout) + inner * 4, whole * (24 + 10 * dropout) + inner * 6


def _llama_rest(whole: float, rotated: float, inner: float) -> tuple[float, float]:
    """The same for the Llama family as its reference code runs unfused. A norm converts to fp32 (6), squares (8),
    averages (4), scales (8), converts back (6) and multiplies by its weight (4): 36, and 68 backward. Rotary positions
    convert queries and keys to fp32, multiply and convert back: 20, and 20 backward. SwiGLU: 10, and 18 backward."""
    return whole * (2 * 36 + 12) + rotated * 20 + inner * 10, whole * (2 * 68 + 12) + rotated * 20 + inner * 18


def head(shape: ModelShape, layout: Layout) -> tuple[Amount, Amount]:
    """Forward and backward of the output matrix and the loss, on the last stage."""
    tokens, columns = layout.micro_batch * shape.length, shape.vocab / layout.tensor
    one, loss = product(tokens, shape.width, columns), Amount(bytes=tokens * columns * LOGIT_BYTES / 2)
    return one + loss, one.times(2) + loss


def optimizer(parameters: float) -> Amount:
    """Adam on `parameters` parameters."""
    return Amount(bytes=OPTIMIZER_BYTES * parameters)
