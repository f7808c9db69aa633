"""The model, its loss and its optimizer, as the options ask for them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from course_lib.job.mesh import Mesh
from course_lib.job.options import Options
from course_lib.job.state import seed_all
from course_lib.tensor import parallel_gpt, vocab_parallel_cross_entropy
from course_lib.train.data import IGNORE, Batch
from course_lib.train.gpt import GPT
from course_lib.train.window import LossOf


def build(options: Options, mesh: Mesh, device: torch.device) -> GPT:
    """The same parameters on every rank, or with `--tp` this rank's shards of them. Collective call."""
    seed_all(options.seed)
    model = GPT(options.config).to(device)
    return model if mesh.shards is None else parallel_gpt(model, mesh.shards, options.sequence_parallel)


def autocast(options: Options, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=options.bf16)


def loss_of(options: Options, mesh: Mesh, device: torch.device) -> LossOf:
    """For whole models: a micro-batch's summed loss and its number of targets."""

    def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        with autocast(options, device):
            scores = model(batch[0])
        return loss_of_scores(options, mesh, scores, batch), terms(batch)

    return loss


def terms(batch: Batch) -> int:
    """Every byte of `Batches` counts: to look for those that do not, the host would wait for the device."""
    return batch[1].numel()


def loss_of_scores(options: Options, mesh: Mesh, scores: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The summed loss of a micro-batch, of what the model or its last stage puts out."""
    _, y = batch
    if mesh.shards is not None:
        return vocab_parallel_cross_entropy(scores, y, mesh.shards, options.config.vocab, ignore_index=IGNORE,
                                            reduction="sum")
    return F.cross_entropy(scores.float().flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum")


def make_optimizer(options: Options, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if options.optimizer == "sgd":
        return torch.optim.SGD(params, options.lr, options.momentum, weight_decay=options.weight_decay)
    return torch.optim.AdamW(params, options.lr, (0.9, 0.99), weight_decay=options.weight_decay)


def learning_rate(options: Options, update: int) -> float:
    """Of update `update`, counted from 0: a function of it alone, so that nothing of it is saved."""
    if update < options.warmup:
        return options.lr * (update + 1) / options.warmup
    if options.decay == "constant":
        return options.lr
    done = (update - options.warmup) / max(1, options.steps - options.warmup)
    return options.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
