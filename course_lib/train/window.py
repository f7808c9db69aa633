"""One window: the micro-steps of one optimizer update, and how their losses add up.

A loss function here is `loss_of(model, batch) -> (sum, count)`: the summed loss of a micro-batch and how
many terms it has (tokens, samples). What a window's loss is depends on what it is divided by:

- `"tokens"`: Σ sums / Σ counts over all micro-batches of all ranks. Right for ragged batches.
- `"micro"`: the mean over micro-batches of their own means. The same where all counts are equal.
- `"none"`: Σ sums.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_lib.train.control import Control
from course_lib.train.phases import Phases

LossOf = Callable[[nn.Module, Any], tuple[torch.Tensor, int | torch.Tensor]]
NORMALISATIONS = ("tokens", "micro", "none")


def micro_scale(normalise: str, count: int | torch.Tensor, micro_steps: int, total_count: int,
                ranks: int) -> float | torch.Tensor:
    """The factor on a micro-batch's summed loss so that the *sum* over all micro-steps of all `ranks` is the
    loss of the window. `micro_steps` is a rank's number in this window (the last may be short), `total_count`
    the sum of counts over ranks. A `count` on a GPU stays there. Raises `ValueError` on an unknown normalisation."""
    if normalise == "tokens":
        return 1 / max(1, total_count)
    if normalise == "micro":
        least = count.double().clamp(min=1) if torch.is_tensor(count) else max(1, count)
        return 1 / (least * micro_steps * ranks)
    if normalise == "none":
        return 1.0
    raise ValueError(f"normalise={normalise!r}: choose one of {', '.join(NORMALISATIONS)}")


def total_of(losses: Sequence[torch.Tensor]) -> float | torch.Tensor:
    """Their sum; on a GPU a tensor there, so that the host goes on to the optimizer without waiting for it."""
    if losses and losses[0].is_cuda:
        return torch.stack(tuple(losses)).double().sum()
    return sum(map(float, losses), 0.0)


def accumulate(model: nn.Module, window: Sequence[Any], loss_of: LossOf, normalise: str = "tokens",
               counts: Sequence[int] | None = None, op: str = "mean", every: bool = False,
               phases: Phases | None = None) -> float | torch.Tensor:
    """Forward and backward of this rank's micro-batches under a strategy, synchronised once, or after `every`
    micro-step; `.grad` is final on return.

    `counts` gives the number of terms of each micro-batch before it is run; it is needed for `"tokens"`,
    because the denominator belongs to the whole window and to all ranks. Under a mean-reducing strategy
    (`op="mean"`) the losses are multiplied by the number of ranks, which the mean divides away again.
    `phases` of the same model let the active recorder see what the micro-steps compute.
    Returns this rank's share of the window's loss, on a GPU as a tensor there. Raises `ValueError` if `counts` is
    missing or wrong.
    """
    group = getattr(model, "group", None) or getattr(model, "process_group", None) or dist.group.WORLD
    ranks = dist.get_world_size(group)
    total = 0
    if normalise == "tokens":
        if counts is None or len(counts) != len(window):
            raise ValueError('normalise="tokens" needs counts: one number of terms for each micro-batch')
        mine = struct.pack("<q", sum(counts))
        total = sum(struct.unpack("<q", c)[0] for c in Control(group).exchange(mine, "the token count of a window"))
    losses: list[torch.Tensor] = []

    def forward(batch: Any) -> torch.Tensor:
        summed, count = loss_of(model, batch)
        loss = summed * micro_scale(normalise, count, len(window), total, ranks)
        losses.append(loss.detach())
        return loss * ranks if op == "mean" else loss

    for i, batch in enumerate(window):
        with nullcontext() if every or i == len(window) - 1 else model.no_sync():
            if phases is None:
                forward(batch).backward()
            else:
                phases.micro_step(partial(forward, batch))
    model.finish_gradient_synchronization()
    return total_of(losses)

