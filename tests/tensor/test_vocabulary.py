"""The vocabulary over ranks: embedding and cross-entropy against PyTorch's on whole tensors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.launch import run
from course_lib.tensor import VocabParallelEmbedding, collect, full_state, vocab_parallel_cross_entropy
from tests.tensor.given import apart, every_degree, numbers, rough

VOCABS = (5, 8, 11)  # 5 on 4 ranks leaves the last rank nothing but padding
GARBAGE = 1e6


def local(scores: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """This rank's columns, with columns of no meaning behind the last of the vocabulary."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    padded = F.pad(scores.detach(), (0, -scores.shape[-1] % ranks), value=GARBAGE)
    return padded.chunk(ranks, dim=-1)[rank].clone().requires_grad_()


def cross_entropies(group: dist.ProcessGroup) -> dict:
    wrong = {}
    for vocab in VOCABS:
        for ignore in (-100, 3):
            for reduction in ("none", "sum", "mean"):
                for scale in (1.0, 1e4):
                    whole = (numbers(3, 4, vocab) * scale).requires_grad_()
                    targets = torch.arange(12).remainder(vocab).view(3, 4)
                    targets[1, :2] = ignore
                    want = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), ignore_index=ignore,
                                           reduction=reduction)
                    part = local(whole, group)
                    got = vocab_parallel_cross_entropy(part, targets, group, vocab, ignore_index=ignore,
                                                       reduction=reduction)
                    upstream = numbers(*got.shape, seed=1)
                    (got * upstream).sum().backward()
                    (want * upstream.view(want.shape)).sum().backward()
                    padding = collect(part.grad, -1, group)[..., vocab:]
                    wrong[vocab, ignore, reduction, scale] = apart(
                        {"loss": got.reshape(want.shape), "scores": collect(part.grad, -1, group)[..., :vocab],
                         "padding": padding},
                        {"loss": want, "scores": whole.grad, "padding": torch.zeros_like(padding)})
    return wrong


def test_cross_entropy_is_that_of_the_whole_scores() -> None:
    for found in run(every_degree, cross_entropies, ranks=4, fabric="loopback"):
        for wrong in found.values():
            assert len(found) == 3 and len(wrong) == 36 and not any(wrong.values()), found


def embeddings(group: dist.ProcessGroup) -> dict:
    wrong, tokens = {}, torch.arange(12).view(3, 4)
    for vocab in VOCABS:
        for sequence in (False, True):
            whole = rough(nn.Embedding(vocab, 6))
            ours = VocabParallelEmbedding.shard(whole, group, sequence_parallel=sequence)
            want = whole(tokens % vocab)
            got = ours(tokens % vocab)
            got = collect(got, 1, group) if sequence else got
            for y in (want, got):
                (y * numbers(*y.shape, seed=1)).sum().backward()
            wrong[vocab, sequence] = apart({"y": got, **full_state(ours, gradients=True)},
                                           {"y": want, "weight": whole.weight.grad})
            rows = range(dist.get_rank(group) * len(ours.weight), (dist.get_rank(group) + 1) * len(ours.weight))
            padding = [i for i, row in enumerate(rows) if row >= vocab]
            if ours.weight[padding].any() or ours.weight.grad[padding].any():
                wrong[vocab, sequence]["padding"] = 1.0
    return wrong


def test_embedding_is_that_of_the_whole_table() -> None:
    for found in run(every_degree, embeddings, ranks=4, fabric="loopback"):
        for wrong in found.values():
            assert len(found) == 3 and len(wrong) == 6 and not any(wrong.values()), found


def edges() -> dict:
    """Dtypes, a window without targets, and what is refused."""
    torch.set_num_threads(1)
    whole, targets = numbers(2, 3, 8).bfloat16(), torch.full((2, 3), 5)
    part = local(whole, None)
    loss = vocab_parallel_cross_entropy(part, targets, None, 8)
    loss.backward()

    def said(*args) -> str:
        try:
            vocab_parallel_cross_entropy(*args)
        except (IndexError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    table = VocabParallelEmbedding.shard(nn.Embedding(8, 2), None)
    try:
        table(torch.tensor([[8]]))
        outside = "nothing"
    except IndexError as error:
        outside = str(error)
    return {
        "loss": (loss.item(), F.cross_entropy(whole.float().flatten(0, 1), targets.flatten()).item(), loss.dtype),
        "grad": part.grad.dtype,
        "nothing": vocab_parallel_cross_entropy(local(whole, None), torch.full((2, 3), -100), None, 8).item(),
        "nothing, summed": vocab_parallel_cross_entropy(local(whole, None), torch.full((2, 3), -100), None, 8,
                                                        reduction="sum").item(),
        "target": said(part, targets + 3, None, 8),
        "negative": said(part, targets - 6, None, 8),
        "shape": said(part, targets, None, 10),
        "token": outside,
    }


def test_edges_and_misuse() -> None:
    for found in run(edges, ranks=2, fabric="loopback"):
        ours, theirs, dtype = found["loss"]
        assert ours == pytest.approx(theirs, rel=1e-6) and dtype is torch.float32
        assert found["grad"] is torch.bfloat16
        assert math.isnan(found["nothing"]) and found["nothing, summed"] == 0.0  # as torch has it
        assert found["target"].startswith("IndexError: target 8 is outside the vocabulary of 8")
        assert found["negative"].startswith("IndexError: target -1 is outside")
        assert found["shape"].startswith("ValueError: scores of (2, 3, 4)")
        assert found["token"].startswith("token 8 is outside")
