"""The vocabulary cut over the ranks: an embedding, and the cross-entropy of scores that no rank sees whole.

(Shoeybi et al., "Megatron-LM", 2019, section 3.) The vocabulary is padded to a multiple of the ranks; what is added
is zero, is never looked up, counts for nothing in the loss, and so gets no gradient.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from course_lib.tensor.regions import all_reduce, reduce_scatter
from course_lib.tensor.shard import Shard, place


class VocabParallelEmbedding(nn.Module):
    """(batch, time) of int64 to (batch, time, width), or to (batch, time/ranks, width) with `sequence_parallel`."""

    def __init__(self, embedding: nn.Embedding, group: dist.ProcessGroup | None, sequence_parallel: bool) -> None:
        super().__init__()
        self.group, self.sequence_parallel, self.partial = group, sequence_parallel, ()
        self.vocab = embedding.num_embeddings
        self.shards = {"weight": Shard(0, self.vocab)}
        self.weight = self.shards["weight"].parameter(embedding.weight, group)

    @classmethod
    def shard(cls, embedding: nn.Embedding, group: dist.ProcessGroup | None, *,
              sequence_parallel: bool = False) -> VocabParallelEmbedding:
        """This rank's rows of `embedding`, copied. Raises `ValueError` for options that a cut embedding lacks."""
        if embedding.padding_idx is not None or embedding.max_norm is not None or embedding.scale_grad_by_freq:
            raise ValueError("padding_idx, max_norm and scale_grad_by_freq are not kept when an embedding is cut; "
                             "build it without them")
        return cls(embedding, group, sequence_parallel)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        _refuse_outside(tokens, self.vocab, "token")
        own, local = _own(tokens, len(self.weight), self.group)
        x = F.embedding(local, self.weight).masked_fill(~own.unsqueeze(-1), 0.0)
        return reduce_scatter(x, 1, self.group) if self.sequence_parallel else all_reduce(x, self.group)


def vocab_parallel_cross_entropy(scores: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup | None,
                                 vocab: int, *, ignore_index: int = -100, reduction: str = "mean") -> torch.Tensor:
    """Cross-entropy in nats, as `torch.nn.functional.cross_entropy` gives it for the whole scores.

    scores: (…, padded vocab/ranks), this rank's columns. targets: (…) of int64, the same on every rank. `vocab` is
    the number of columns before padding. Computed in float32 at least; two all-reduces, of one and of two numbers a
    target, instead of an all-gather of the scores. Returns the same on every rank, and each rank's backward is that
    of the whole loss. Raises `ValueError` for shapes or a reduction that do not fit, `IndexError` for a target
    outside the vocabulary.
    """
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction={reduction!r}: choose one of none, sum, mean")
    ranks = place(group)[1]
    if scores.shape[:-1] != targets.shape or scores.shape[-1] != -(-vocab // ranks):
        raise ValueError(f"scores of {tuple(scores.shape)} for targets of {tuple(targets.shape)}: a vocabulary of "
                         f"{vocab} on {ranks} ranks needs {(*targets.shape, -(-vocab // ranks))}")
    kept = targets != ignore_index
    _refuse_outside(targets[kept], vocab, "target")
    loss = _CrossEntropy.apply(scores, targets, kept, group, vocab)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / kept.sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, targets, kept, group, vocab):
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        columns = torch.arange(wide.shape[-1], device=wide.device) + place(group)[0] * wide.shape[-1]
        wide = wide.masked_fill(columns >= vocab, -torch.inf)
        highest = wide.amax(dim=-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        shifted = wide - highest.unsqueeze(-1)
        own, local = _own(targets, wide.shape[-1], group)
        own = own & kept
        local = local.unsqueeze(-1)
        powers = shifted.exp()
        sums = torch.stack([powers.sum(dim=-1), shifted.gather(-1, local).squeeze(-1).masked_fill(~own, 0.0)])
        dist.all_reduce(sums, group=group)
        total, right = sums
        ctx.save_for_backward(powers / total.unsqueeze(-1), own, local, kept)
        ctx.dtype = scores.dtype
        return (total.log() - right).masked_fill(~kept, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        share, own, local, kept = ctx.saved_tensors
        grad_scores = share.scatter_add(-1, local, -own.unsqueeze(-1).to(share.dtype)) * grad.unsqueeze(-1)
        return grad_scores.masked_fill(~kept.unsqueeze(-1), 0.0).to(ctx.dtype), None, None, None, None


def _own(indices: torch.Tensor, rows: int, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Which indices lie in this rank's rows, and where there; 0 for the others, to be masked."""
    local = indices - place(group)[0] * rows
    own = (local >= 0) & (local < rows)
    return own, local.masked_fill(~own, 0)


def _refuse_outside(indices: torch.Tensor, vocab: int, what: str) -> None:
    outside = (indices < 0) | (indices >= vocab)
    if outside.is_cuda:  # the host does not wait to hear it; the device stops, as in torch's own embedding
        torch._assert_async(~outside.any(), f"{what} is outside the vocabulary of {vocab}, so no rank holds it")
    elif outside.any():
        raise IndexError(f"{what} {int(indices[outside][0])} is outside the vocabulary of {vocab}, so no rank holds it")
