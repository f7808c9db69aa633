"""Bytes that one rank sends for one gradient, by ring collectives, in closed form.

`shapes` are those of the parameters, float32; W is the number of ranks. The layout of buckets does not matter,
because every scheme works parameter by parameter. Headers of the network are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from course_lib.compress.onebit import part_of
from course_lib.compress.powersgd import factors
from course_lib.compress.topk import count_of
from course_lib.plan.volumes import all_reduce_bytes, shuffle_bytes

Shapes = Sequence[tuple[int, ...]]


def float32(shapes: Shapes, W: int) -> float:
    """2(W−1)/W·4 bytes an entry."""
    return all_reduce_bytes(4 * _total(shapes), W)


def half(shapes: Shapes, W: int) -> float:
    """fp16 or bf16: 2(W−1)/W·2 bytes an entry."""
    return all_reduce_bytes(2 * _total(shapes), W)


def one_bit(shapes: Shapes, W: int) -> float:
    """2(W−1)/W·(1/8 byte an entry), each parameter padded to a multiple of 32·W entries, and 8(W−1) bytes of scales
    for each parameter."""
    row = sum(part_of(math.prod(shape), W) // 8 + 4 for shape in shapes)
    return 2 * shuffle_bytes(W * row, W)


def top_k(shapes: Shapes, W: int, k: float) -> float:
    """(W−1)·8 bytes for each entry that is sent."""
    return shuffle_bytes(W * 8 * sum(count_of(math.prod(shape), k) for shape in shapes), W)


def power_sgd(shapes: Shapes, W: int, rank: int = 1, min_saving: float = 2.0) -> float:
    """2(W−1)/W·4·r·(n + m) bytes for a matrix (n, m) that gets smaller by it, all of the others."""
    entries = 0
    for shape in shapes:
        thin = factors(shape, rank, min_saving)
        entries += (thin[0] + thin[1]) * thin[2] if thin else math.prod(shape)
    return all_reduce_bytes(4 * entries, W)


def top_k_crossover(W: int, entry_bytes: int = 8, against_bytes: int = 4) -> float:
    """The share of entries at which top-k by all-gather sends as much as a ring all-reduce of everything.

    (W−1)·k·entry_bytes = 2(W−1)/W·against_bytes: 1/W against float32, 1/(2W) against half precision; with 64-bit
    indices an entry takes 12 bytes.
    """
    return 2 * against_bytes / (W * entry_bytes)


def _total(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)
