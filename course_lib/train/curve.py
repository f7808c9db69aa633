"""Loss against updates and against seconds: a strategy in training on text, for as many of either as wanted."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_lib.train import data
from course_lib.train.clip import clip_grad_norm
from course_lib.train.control import Control
from course_lib.train.ddp import wrap
from course_lib.train.delayed import Delayed
from course_lib.train.gpt import GPT, GPTConfig, next_byte_loss
from course_lib.train.local_sgd import LocalSGD
from course_lib.train.sharded import Sharded
from course_lib.train.window import accumulate

SMALL = GPTConfig(length=64, layers=2, heads=2, width=64)


@dataclass(frozen=True)
class Point:
    """`seconds` of training until `update` updates were begun (rank 0's clock, evaluations left out), the held-out
    `loss` there in nats a byte, and the `bytes` that rank 0 had sent by then (0 where the wire does not count)."""

    update: int
    seconds: float
    loss: float
    bytes: float


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=2e-3, betas=(0.9, 0.99), foreach=False)


def train_text(strategy: str, options: dict[str, Any] | None = None, *, updates: int | None = None,
               seconds: float | None = None, micro_steps: int = 4, batch: int = 4, config: GPTConfig = SMALL,
               make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw,
               max_norm: float | None = None, measure_every: int = 10, held_out: int = 16, max_mb: float = 1.0,
               seed: int = 0) -> list[Point]:
    """Train a small GPT on the standard library's sources under `wrap(strategy, …, **options)`; to be called on every
    rank. Ends after `updates` windows of `micro_steps` micro-batches a rank, or when `seconds` of training have
    passed, looked at after each `measure_every` windows; whichever comes first.

    The loss is the mean over `held_out` batches, the same in every run, of which each rank takes its share with the
    parameters it has then; training never sees that text. The last point comes after what a strategy owes at the end:
    gradients that are under way are applied, and local parameters averaged. Every strategy sees the same batches in
    the same order. `max_norm` clips by the global norm before each step (a step per bucket refuses it). Returns the
    same points on all ranks. A gradient that is under way travels on during an evaluation, so keep `measure_every`
    large where seconds are compared. Raises `ValueError` for a limit that is missing or not above 0.
    """
    limits = [limit for limit in (updates, seconds) if limit is not None]
    if not limits or min(limits) <= 0 or min(micro_steps, measure_every) < 1:
        raise ValueError(f"updates={updates}, seconds={seconds}, micro_steps={micro_steps}, measure_every="
                         f"{measure_every}: give one limit above 0, and at least 1 of the others")
    torch.manual_seed(seed)
    model = wrap(strategy, GPT(config), **(options or {}))
    sharded = isinstance(model, Sharded)
    optimizer = make_optimizer(model.shards() if sharded else [p for p in model.parameters() if p.requires_grad])
    if hasattr(model, "take_optimizer"):
        model.take_optimizer(optimizer)
    text = data.text(max_mb)
    rank, ranks, cut = dist.get_rank(), dist.get_world_size(), len(text) * 9 // 10
    train = data.batches(text[:cut], batch, config.length, 2**31, seed=seed, rank=rank)
    test = list(data.batches(text[cut:], batch, config.length, held_out, seed=seed))[rank::ranks]
    control = Control(dist.group.WORLD)
    points, elapsed, sent = [], 0.0, _sent()

    def measure(update: int) -> Point:
        return _measure(model, test, control, update, elapsed, _sent() - sent)

    points.append(measure(0))
    for update in count(1):
        begin = time.perf_counter()
        accumulate(model, [next(train) for _ in range(micro_steps)], next_byte_loss, normalise="micro",
                   every=sharded and not model.whole_gradients)
        if max_norm is not None:
            model.clip_grad_norm(max_norm) if sharded else clip_grad_norm(model.parameters(), max_norm)
        if not getattr(model, "steps_itself", False):
            optimizer.step()
        optimizer.zero_grad()
        elapsed += time.perf_counter() - begin
        if update == updates or update % measure_every == 0:
            points.append(measure(update))
            if update == updates or (seconds is not None and points[-1].seconds >= seconds):
                break
    begin = time.perf_counter()
    if _settle(model, optimizer):
        elapsed += time.perf_counter() - begin
        points[-1] = measure(points[-1].update)
    return points


def _settle(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Do what the strategy has put off. Was there anything?"""
    if isinstance(model, Delayed):
        left = 0
        for _ in model.flush():
            left += 1
            optimizer.step()
            optimizer.zero_grad()
        return left > 0
    if isinstance(model, LocalSGD) and model.local_steps:
        model.average()
        return True
    return False


@torch.no_grad()
def _measure(model: nn.Module, batches: list[data.Batch], control: Control, update: int, elapsed: float,
             sent: float) -> Point:
    """Every rank takes its own batches; the clock and the bytes are rank 0's."""
    losses = [next_byte_loss(model.module, batch) for batch in batches]
    mine = struct.pack("<4d", sum(float(s) for s, _ in losses), sum(n for _, n in losses), elapsed, sent)
    notes = [struct.unpack("<4d", note) for note in control.exchange(mine, f"the loss after {update} updates")]
    summed, terms = (sum(note[i] for note in notes) for i in range(2))
    return Point(update, notes[0][2], summed / terms, notes[0][3])


def _sent() -> float:
    """Bytes this rank's wire has carried; 0 where it does not count."""
    traffic = getattr(dist.group.WORLD, "traffic", None)
    return float(sum(traffic.bytes.values())) if traffic is not None else 0.0
