"""The GPT of `train.gpt` over the ranks of a group. Its own forward runs; only its layers are exchanged.

Names of parameters stay, so `full_state` gives what the plain model loads.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn

from course_lib.tensor.gradients import sequence_parallel as on_shards
from course_lib.tensor.linear import ColumnParallel, RowParallel
from course_lib.tensor.regions import split
from course_lib.tensor.shard import share
from course_lib.tensor.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy
from course_lib.train.data import IGNORE, Batch, terms_of
from course_lib.train.gpt import GPT, Block


class SequenceSlice(nn.Module):
    """An embedding of positions of which each rank of a sequence-parallel group looks up its own: (time,) to
    (time/ranks, width)."""

    def __init__(self, embedding: nn.Embedding, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.weight = embedding.weight
        on_shards(self, group)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(split(positions, 0, self.group), self.weight)


def parallel_attention(block: Block, group: dist.ProcessGroup | None, **how) -> Block:
    """Exchange the attention of a block in place: each rank computes heads/ranks heads. `how` is
    `sequence_parallel` and `chunks`. Raises `ValueError` where the ranks do not divide the heads."""
    block.heads = share(block.heads, group, "the number of heads")
    block.qkv = ColumnParallel.shard(block.qkv, group, blocks=3, **how)
    block.out = RowParallel.shard(block.out, group, **how)
    return block


def parallel_mlp(block: Block, group: dist.ProcessGroup | None, **how) -> Block:
    """Exchange the MLP of a block in place: each rank computes a part of the hidden units. `how` as for
    `parallel_attention`. Raises `ValueError` where the ranks do not divide the hidden units."""
    block.up = ColumnParallel.shard(block.up, group, **how)
    block.down = RowParallel.shard(block.down, group, **how)
    return block


def parallel_gpt(model: GPT, group: dist.ProcessGroup | None = None, sequence_parallel: bool = False,
                 chunks: int = 1) -> GPT:
    """A tensor-parallel copy of the first rank's `model`: (batch, time) of tokens, the same on every rank of the
    group, to this rank's columns of the scores, (batch, time, padded vocab/ranks). Collective call.

    Its loss is `parallel_next_byte_loss`. With `sequence_parallel`, norms and residuals see time/ranks rows, which
    the ranks must divide; matmuls and collectives overlap in `chunks`; and `finish_replicated_gradients` is due
    before the step. Raises `ValueError` for heads or widths that the ranks do not divide.
    """
    model = copy.deepcopy(model)
    for param in model.parameters():
        dist.broadcast(param.detach(), group=group, group_src=0)
    how = {"sequence_parallel": sequence_parallel, "chunks": chunks}
    model.embed = VocabParallelEmbedding.shard(model.embed, group, sequence_parallel=sequence_parallel)
    model.head = ColumnParallel.shard(model.head, group, pad=True, **how)
    if model.config.tied:
        model.head.weight = model.embed.weight
    for block in model.blocks:
        parallel_mlp(parallel_attention(block, group, **how), group, **how)
    if sequence_parallel:
        model.position = SequenceSlice(model.position, group)
        for norm in [model.norm, *(norm for block in model.blocks for norm in (block.norm1, block.norm2))]:
            on_shards(norm, group)
    return model


def parallel_next_byte_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int | torch.Tensor]:
    """As `train.gpt.next_byte_loss`, for a model of `parallel_gpt`: the same numbers on every rank."""
    x, y = batch
    scores, embed = model(x), _embedding(model)
    summed = vocab_parallel_cross_entropy(scores, y, embed.group, embed.vocab, ignore_index=IGNORE, reduction="sum")
    return summed, terms_of(y)


def _embedding(model: nn.Module) -> VocabParallelEmbedding:
    """Also of a model that a data-parallel wrapper holds."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            return module
    raise ValueError("the model has no vocabulary-parallel embedding; build it with parallel_gpt")
