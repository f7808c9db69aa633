"""What compression does to training: simulated ranks in one process, with the arithmetic of the real schemes.

Accuracy needs no wires. Training is short, so that a scheme that slows it shows, and the optimizer has no momentum,
because momentum hides what a biased scheme does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import nn

from course_lib.compress import onebit, powersgd, topk

Grads = list[torch.Tensor]


@dataclass
class Simulated:
    """A scheme on `workers` ranks: `mean(name, gradients)` is what every rank gets for a parameter's gradients.

    `scheme` is dense, fp16, bf16, onebit, topk (share `k`) or powersgd (`rank`). Raises `ValueError` on another name.
    """

    scheme: str = "dense"
    k: float = 0.01
    rank: int = 1
    error_feedback: bool = True
    _left: dict[tuple, torch.Tensor] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        self._exchange: Callable[[str, Grads], tuple[torch.Tensor, Grads]] | None = {
            "dense": lambda name, sums: (_mean(sums), sums), "fp16": lambda name, sums: _cast(sums, torch.float16),
            "bf16": lambda name, sums: _cast(sums, torch.bfloat16), "onebit": self._one_bit, "topk": self._top_k,
            "powersgd": self._power_sgd}.get(self.scheme)
        if self._exchange is None:
            raise ValueError(f"unknown scheme {self.scheme!r}: choose dense, fp16, bf16, onebit, topk or powersgd")

    def mean(self, name: str, grads: Grads) -> torch.Tensor:
        sums = [self._plus_left((name, worker), g) for worker, g in enumerate(grads)]
        mean, sent = self._exchange(name, sums)
        for worker, (total, part) in enumerate(zip(sums, sent)):
            self._left[name, worker] = total - part
        return mean

    def _plus_left(self, key: tuple, x: torch.Tensor) -> torch.Tensor:
        return x + self._left[key] if self.error_feedback else x

    def _one_bit(self, name: str, sums: Grads) -> tuple[torch.Tensor, Grads]:
        def there_and_back(x: torch.Tensor) -> torch.Tensor:
            return onebit.decompress(*onebit.compress(x.reshape(-1)), x.numel()).view(x.shape)

        sent = [there_and_back(x) for x in sums]
        second = self._plus_left((name, "second"), _mean(sent))
        mean = there_and_back(second)
        self._left[name, "second"] = second - mean
        return mean, sent

    def _top_k(self, name: str, sums: Grads) -> tuple[torch.Tensor, Grads]:
        sent = [topk.decompress(*topk.compress(x.reshape(-1), self.k), x.numel()).view(x.shape) for x in sums]
        return _mean(sent), sent

    def _power_sgd(self, name: str, sums: Grads) -> tuple[torch.Tensor, Grads]:
        thin = powersgd.factors(tuple(sums[0].shape), self.rank)
        if thin is None:
            return _mean(sums), sums
        rows, columns, rank = thin
        matrices = [x.reshape(rows, columns) for x in sums]
        if (name, "q") not in self._left:
            self._left[name, "q"] = torch.randn(columns, rank, generator=torch.Generator().manual_seed(0))
        p, mean_q = powersgd.compress(_mean(matrices), self._left[name, "q"])
        self._left[name, "q"] = mean_q
        shape = sums[0].shape
        return powersgd.decompress(p, mean_q).view(shape), [(p @ (p.T @ m)).view(shape) for m in matrices]


def _mean(tensors: Grads) -> torch.Tensor:
    return torch.stack(tensors).mean(0)


def _cast(sums: Grads, dtype: torch.dtype) -> tuple[torch.Tensor, Grads]:
    halves = [(x / len(sums)).to(dtype) for x in sums]
    return torch.stack(halves).sum(0, dtype=dtype).float(), sums


@lru_cache(maxsize=4)
def task(seed: int = 0, samples: int = 20_000, features: int = 64, classes: int = 10) -> tuple[torch.Tensor, ...]:
    """(x, y) of a classification that a random network of two layers decides, first half for training. float32
    (samples, features) and int64 (samples,)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, features, generator=generator)
    inner = torch.randn(features, 32, generator=generator) / features**0.5
    outer = torch.randn(32, classes, generator=generator)
    return x, (torch.tanh(2 * x @ inner) @ outer).argmax(1)


def accuracy(scheme: str = "dense", *, k: float = 0.01, rank: int = 1, error_feedback: bool = True, workers: int = 8,
             steps: int = 400, batch: int = 16, lr: float = 0.1, momentum: float = 0.0, seed: int = 0) -> float:
    """Top-1 accuracy, in percent, on samples that were not trained on, after `steps` updates."""
    x, y = task(seed)
    half = len(x) // 2
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(x.shape[1], 128), nn.ReLU(), nn.Linear(128, 10))
    names, params = zip(*model.named_parameters())
    exchange = Simulated(scheme, k, rank, error_feedback)
    optimizer = torch.optim.SGD(params, lr=lr, momentum=momentum)
    picks = torch.randint(half, (steps, workers, batch), generator=torch.Generator().manual_seed(seed))
    for step in picks:
        every = [torch.autograd.grad(nn.functional.cross_entropy(model(x[i]), y[i]), params) for i in step]
        for name, param, grads in zip(names, params, zip(*every)):
            param.grad = exchange.mean(name, list(grads))
        optimizer.step()
    with torch.no_grad():
        return 100 * float((model(x[half:]).argmax(1) == y[half:]).float().mean())
