"""A small GPT on bytes: plain, readable, and real enough that its gradients have a GPT's sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib.train.data import IGNORE, Batch, terms_of


@dataclass(frozen=True)
class GPTConfig:
    """`checkpoint` recomputes each block in backward instead of keeping its activations."""

    vocab: int = 256
    length: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128
    tied: bool = True
    checkpoint: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not a multiple of heads={self.heads}")


class Block(nn.Module):
    """Causal self-attention, then a two-layer MLP, each added to what came in. (batch, time, width) both ways."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.norm1, self.norm2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.qkv, self.out = nn.Linear(c.width, 3 * c.width), nn.Linear(c.width, c.width)
        self.up, self.down = nn.Linear(c.width, 4 * c.width), nn.Linear(4 * c.width, c.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Bytes in, scores of the next byte out: (batch, time) int64 to (batch, time, vocab). With `tied=True` the
    embedding is the output matrix too: one parameter, used first and last."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        c = self.config = config or GPTConfig()
        self.embed, self.position = nn.Embedding(c.vocab, c.width), nn.Embedding(c.length, c.width)
        self.blocks = nn.ModuleList([Block(c) for _ in range(c.layers)])
        self.norm = nn.LayerNorm(c.width)
        self.head = nn.Linear(c.width, c.vocab, bias=False)
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)
        if c.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.shape[1] > self.config.length:
            raise ValueError(f"{tokens.shape[1]} bytes a row, but the model was built for length={self.config.length}")
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.config.checkpoint else block(x)
        return self.head(self.norm(x))


def next_byte_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int | torch.Tensor]:
    """Summed cross-entropy in nats of the targets that count, and how many they are."""
    x, y = batch
    scores = model(x)
    summed = F.cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum")
    return summed, terms_of(y)


def squared_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    """Summed squared error, and the number of samples."""
    x, y = batch
    return (model(x) - y).square().sum(), len(x)
