"""A GPT cut into the stages of a pipeline, under the names that its parameters have in the whole model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib.train.gpt import GPT


class Stage(nn.Module):
    """Blocks `first` to `last` (not included) of `model`; the first stage embeds, the last one scores."""

    def __init__(self, model: GPT, first: int, last: int, autocast: Callable[[], AbstractContextManager]) -> None:
        super().__init__()
        self.config, self._autocast = model.config, autocast
        self.embeds, self.scores = first == 0, last == len(model.blocks)
        if self.embeds:
            self.embed, self.position = model.embed, model.position
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(first, last)})
        if self.scores:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._autocast():
            if self.embeds:
                x = self.embed(x) + self.position(torch.arange(x.shape[1], device=x.device))
            for block in self.blocks.values():
                x = checkpoint(block, x, use_reentrant=False) if self.config.checkpoint else block(x)
            return self.head(self.norm(x)) if self.scores else x


def cut(model: GPT, stages: int, autocast: Callable[[], AbstractContextManager]) -> list[Stage]:
    """Stages of about equally many blocks, at least one each."""
    ends = [round(len(model.blocks) * s / stages) for s in range(stages + 1)]
    return [Stage(model, first, last, autocast) for first, last in pairwise(ends)]
