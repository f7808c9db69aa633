"""Loss against updates and against seconds for several strategies, one after the other on the same ranks and wire."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from course_lib.launch import Fabric, run

if TYPE_CHECKING:
    from course_lib.train.curve import Point

SHAPE = {"length": 16, "layers": 1, "heads": 2, "width": 32}
ROWS, LR = 16, 1e-2


def loss_curves(strategies: Mapping[str, tuple[str, Mapping[str, Any]]], *, seconds: float, ranks: int = 2,
                fabric: str | Fabric = "auto", measure_every: int = 20, seed: int = 0,
                timeout_s: float = 300.0) -> dict[str, list[Point]]:
    """Train a very small GPT on text with AdamW under each strategy of `train.STRATEGIES`, each for `seconds` of its
    own clock, from the same weights and with the same batches in the same order. See `train.curve.train_text`."""
    entries = {name: (strategy, dict(options)) for name, (strategy, options) in strategies.items()}
    return run(_on_rank, entries, seconds, measure_every, seed, ranks=ranks, fabric=fabric, timeout_s=timeout_s)[0]


def loss_at(points: list[Point], axis: Literal["update", "seconds"], value: float) -> float:
    """The loss there, on the straight line between the two points beside it."""
    for before, after in pairwise(points):
        low, high = getattr(before, axis), getattr(after, axis)
        if low <= value <= high and low < high:
            return before.loss + (after.loss - before.loss) * (value - low) / (high - low)
    return points[-1].loss


def update_s(points: list[Point]) -> float:
    """Seconds of an update, the mean over the run."""
    return points[-1].seconds / points[-1].update


def _on_rank(entries, seconds, measure_every, seed):
    import torch

    from course_lib.train.curve import train_text
    from course_lib.train.gpt import GPTConfig

    torch.set_num_threads(1)

    def adamw(params):
        return torch.optim.AdamW(params, lr=LR, foreach=False)

    return {name: train_text(strategy, options, seconds=seconds, micro_steps=1, batch=ROWS, config=GPTConfig(**SHAPE),
                             make_optimizer=adamw, measure_every=measure_every, held_out=8, seed=seed)
            for name, (strategy, options) in entries.items()}
