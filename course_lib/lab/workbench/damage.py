"""What a wrong window does to the parameters: drift against one process that sees all data.

`damage(…)` trains a tiny GPT on ragged rows of real text on every rank of one run, once with each of the learner's
functions and once with each well-known mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Report = dict[str, dict[str, float]]

ROWS, LENGTH, EPOCHS = 8, 12, 2
SHORT = 5
"""Micro-batches of an epoch in the test of the last short window; its windows have SHORT_N of them."""
SHORT_N = 2
MAX_NORM = 0.3


def damage(window_factors: Callable, train_epoch: Callable, clipped_update: Callable, *, ranks: int = 2) -> Report:
    """Largest difference of a parameter from the single-process reference, by topic and way: `split` (N = 1, 2, 4, 8
    with the learner's factors), `loss`, `short` and `clip` (the learner's and the mistakes), all on plain gloo."""
    from course_lib.lab.workbench.buckets import _run

    return _run(_on_rank, window_factors, train_epoch, clipped_update, ranks=ranks, fabric="loopback", timeout_s=90)[0]


def _on_rank(window_factors, train_epoch, clipped_update) -> Report:
    bench = Bench()
    loss = {"yours": window_factors,
            "mean of means": lambda mine, ranks, total: [1 / (len(mine) * count) for count in mine],
            "own count": lambda mine, ranks, total: [1 / sum(mine)] * len(mine),
            "divided twice": lambda mine, ranks, total: [1 / total(sum(mine))] * len(mine)}  # fmt: skip
    short = {"yours": train_epoch, "dropped": _dropped, "leaks": _leaks, "still divided by N": _still_divided}
    clip = {"yours": clipped_update, "every micro-step": _clip_every, "before synchronisation": _clip_before}
    return {
        "split": {f"N={N}": bench.ragged(window_factors, N) for N in (1, 2, 4, 8)},
        "loss": {name: bench.ragged(factors, 4) for name, factors in loss.items()},
        "short": {name: bench.epochs(epoch) for name, epoch in short.items()},
        "clip": {name: bench.clipped(update) for name, update in clip.items()},
    }


def _dropped(batches, N, micro_step, update):
    _leaks(batches[:len(batches) // N * N], N, micro_step, update)


def _leaks(batches, N, micro_step, update):
    for i, batch in enumerate(batches):
        micro_step(batch, 1 / N)
        if (i + 1) % N == 0:
            update()


def _still_divided(batches, N, micro_step, update):
    for i, batch in enumerate(batches):
        micro_step(batch, 1 / N)
        if (i + 1) % N == 0 or i + 1 == len(batches):
            update()


def _clip_every(params, N, micro_step, synchronise, step, max_norm):
    from course_lib.train.clip import clip_grad_norm

    for i in range(N):
        micro_step(i)
        clip_grad_norm(params, max_norm)
    synchronise()
    step()


def _clip_before(params, N, micro_step, synchronise, step, max_norm):
    from course_lib.train.clip import clip_grad_norm

    for i in range(N):
        micro_step(i)
    clip_grad_norm(params, max_norm)
    synchronise()
    step()


class Bench:
    """One rank's side: tiny models, their data, and the reference they are compared with."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def make(self) -> Any:
        import torch

        from course_lib.train.gpt import GPT, GPTConfig

        torch.manual_seed(0)
        return GPT(GPTConfig(length=16, layers=1, heads=2, width=12))

    @staticmethod
    def optimizer(params: Any) -> Any:
        import torch

        return torch.optim.SGD(params, lr=0.5, momentum=0.9)

    @staticmethod
    def batches(rank: int, count: int, rows: int = ROWS, ragged: bool = True) -> list:
        from course_lib.train import data

        return list(data.batches(data.text(0.1), rows, LENGTH, count, seed=3, rank=rank, ragged=ragged))

    def average(self, params: list) -> None:
        import torch.distributed as dist

        for param in params:
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= self.ranks

    def total(self, number: float) -> float:
        import torch
        import torch.distributed as dist

        found = torch.tensor(float(number), dtype=torch.float64)
        dist.all_reduce(found)
        return float(found)

    def drift(self, model: Any, windows: list, normalise: str, before_step: Any = None) -> float:
        from course_lib.train.gpt import next_byte_loss
        from course_lib.train.reference import reference

        right = reference(self.make, windows, next_byte_loss, self.optimizer, normalise, before_step)
        return max((p.detach() - right[n]).abs().max().item() for n, p in model.named_parameters())

    def ragged(self, factors_of: Callable, N: int) -> float:
        """Updates on the same ragged rows, cut into N micro-batches."""
        from course_lib.train.data import count_of
        from course_lib.train.gpt import next_byte_loss

        model = self.make()
        params, stepper = list(model.parameters()), self.optimizer(model.parameters())
        for rows in self.batches(self.rank, EPOCHS):
            micro = list(zip(*(part.chunk(N) for part in rows)))
            factors = factors_of([count_of(batch) for batch in micro], self.ranks, self.total)
            for batch, factor in zip(micro, factors):
                (next_byte_loss(model, batch)[0] * factor).backward()
            self.average(params)
            stepper.step()
            stepper.zero_grad()
        everybody = [self.batches(rank, EPOCHS) for rank in range(self.ranks)]
        return self.drift(model, [[[rows[k]] for rows in everybody] for k in range(EPOCHS)], "tokens")

    def epochs(self, train_epoch: Callable) -> float:
        """Two epochs of five micro-batches in windows of two."""
        from course_lib.train.gpt import next_byte_loss

        model = self.make()
        params, stepper = list(model.parameters()), self.optimizer(model.parameters())
        everybody = [self.batches(rank, SHORT, 2, ragged=False) for rank in range(self.ranks)]

        def micro_step(batch, factor):
            summed, count = next_byte_loss(model, batch)
            (summed / count * factor).backward()

        def update():
            self.average(params)
            stepper.step()
            stepper.zero_grad()

        for _ in range(EPOCHS):
            train_epoch(everybody[self.rank], SHORT_N, micro_step, update)
        starts = range(0, SHORT, SHORT_N)
        windows = [[rows[i:i + SHORT_N] for rows in everybody] for _ in range(EPOCHS) for i in starts]
        return self.drift(model, windows, "micro")

    def clipped(self, update: Callable) -> float:
        """Updates of two micro-steps, clipped by the global norm."""
        from course_lib.train.clip import clip_grad_norm
        from course_lib.train.gpt import next_byte_loss

        model, N = self.make(), 2
        params, stepper = list(model.parameters()), self.optimizer(model.parameters())
        everybody = [self.batches(rank, N * EPOCHS, 2, ragged=False) for rank in range(self.ranks)]
        for k in range(EPOCHS):
            def micro_step(i, k=k):
                summed, count = next_byte_loss(model, everybody[self.rank][N * k + i])
                (summed / count / N).backward()

            update(params, N, micro_step, lambda: self.average(params), stepper.step, MAX_NORM)
            stepper.zero_grad()
        windows = [[rows[N * k:N * k + N] for rows in everybody] for k in range(EPOCHS)]
        return self.drift(model, windows, "micro", lambda m: clip_grad_norm(m.parameters(), MAX_NORM))
