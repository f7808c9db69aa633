"""What the parameters must be: all ranks' micro-batches, one after the other, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from course_lib.train.window import LossOf, micro_scale


def reference(make_model: Callable[[], nn.Module], windows: Sequence[Sequence[Sequence[Any]]], loss_of: LossOf,
              make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
              normalise: str = "tokens",
              before_step: Callable[[nn.Module], None] | None = None) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name after one update for each of `windows`.

    `windows[k][rank][i]` is micro-batch i of a rank in update k; ranks and windows may have different
    numbers of them. `loss_of(model, batch) -> (sum, count)`; see `window` for `normalise`. `before_step(model)`
    is the place to clip. No process group is needed. Raises `ValueError` on a window without micro-batches.
    """
    model = make_model()
    optimizer = make_optimizer(p for p in model.parameters() if p.requires_grad)
    for k, window in enumerate(windows):
        if not any(len(micros) for micros in window):
            raise ValueError(f"window {k} has no micro-batches")
        losses = [(*loss_of(model, batch), len(micros)) for micros in window for batch in micros]
        total = sum(count for _, count, _ in losses)
        for summed, count, micro_steps in losses:
            (summed * micro_scale(normalise, count, micro_steps, total, len(window))).backward()
        if before_step is not None:
            before_step(model)
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
