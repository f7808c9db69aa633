"""The loss of one window over ragged tokens: Σ loss / Σ tokens over its micro-steps *and* the ranks.

`window.accumulate` runs a window so; here are its parts, for loops of one's own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch.distributed as dist

from course_lib.train.control import Control

Item = TypeVar("Item")


def windows(micro_batches: Sequence[Item], N: int) -> Iterator[Sequence[Item]]:
    """The micro-batches of one epoch in windows of N; the last one is short where N does not divide their number.

    Every window is one update: divide by its own length or token count, never by N. Raises `ValueError` for N < 1.
    """
    if N < 1:
        raise ValueError(f"N={N}: a window has at least one micro-step")
    for start in range(0, len(micro_batches), N):
        yield micro_batches[start:start + N]


def updates(micro_batches: int, N: int) -> int:
    """Optimizer updates of one epoch, ⌈micro_batches / N⌉: what a learning-rate schedule counts."""
    if N < 1 or micro_batches < 0:
        raise ValueError(f"{micro_batches} micro-batches in windows of {N}: give 0 or more, and at least 1")
    return -(-micro_batches // N)


def global_tokens(counts: Sequence[int], group: dist.ProcessGroup | None = None) -> int:
    """Tokens that count in this window, over all its micro-batches on all ranks. Collective call, before the first
    forward: the denominator is needed by the first backward already. Raises `ValueError` on a negative count."""
    if any(count < 0 for count in counts):
        raise ValueError(f"token counts {list(counts)}: a count is 0 or more")
    notes = Control(group or dist.group.WORLD).exchange(struct.pack("<q", sum(counts)), "the token count of a window")
    return sum(struct.unpack("<q", note)[0] for note in notes)


def token_factor(counts: Sequence[int], group: dist.ProcessGroup | None = None, op: str = "mean") -> float:
    """What to multiply every *summed* micro-batch loss of this window by before its backward, so that the gradient
    after an all-reduce is that of the mean loss over all tokens. An `op="mean"` all-reduce divides by the number of
    ranks, which the factor undoes. 0 where no token counts anywhere. Collective call."""
    if op not in ("mean", "sum"):
        raise ValueError(f"op={op!r}: choose 'mean' or 'sum'")
    total = global_tokens(counts, group)
    return (dist.get_world_size(group) if op == "mean" else 1) / total if total else 0.0
