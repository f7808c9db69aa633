"""Models whose gradients are given numbers, and what each scheme must make of them, in numpy, one process."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from course_lib.compress import hook
from course_lib.train import wrap

SHAPES = {"a": (7, 6), "scalar": (), "bias": (13,), "empty": (0, 3), "wide": (20, 33), "kernel": (8, 3, 3, 3)}
K, RANK = 0.1, 2
OPTIONS = {"fp16": {}, "bf16": {}, "onebit": {}, "topk": {"k": K}, "powersgd": {"rank": RANK}}
SMALL = 0.0004


class Given(nn.Module):
    """Called with one tensor a parameter, it has these as gradients."""

    def __init__(self, shapes=SHAPES, dtype=torch.float32) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, grads):
        return sum((p * grads[n]).sum() for n, p in self.named_parameters())


def gradient(rank: int, update: int, shapes=SHAPES) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * update + rank)
    return {n: torch.randn(s, generator=generator) * 10 ** (i - 2) for i, (n, s) in enumerate(shapes.items())}


def train(wrapped: nn.Module, rank: int, updates: range, change: Callable = lambda grads, update: grads) -> list[dict]:
    """Gradients of every update, each accumulated in two micro-steps."""
    out = []
    for update in updates:
        wrapped.zero_grad()
        grads = change(gradient(rank, update), update)
        halves = {n: g / 2 for n, g in grads.items()}
        with wrapped.no_sync():
            wrapped(halves).backward()
        wrapped(halves).backward()
        wrapped.finish_gradient_synchronization()
        out.append({n: p.grad.clone() for n, p in wrapped.module.named_parameters()})
    return out


def wrapped_with(state, module: nn.Module, kind: str = "bucketed", **options) -> nn.Module:
    return wrap(kind, module, bucket_mb=SMALL, first_bucket_mb=None, comm_hook=hook, hook_state=state, **options)


def flat(x: torch.Tensor) -> np.ndarray:
    return x.numpy().reshape(-1).astype(np.float32)


class Reference:
    """`mean(name, list of every rank's gradient) -> np.ndarray` of one update after the other."""

    def __init__(self, scheme: str, ranks: int, feedback: bool = True, first_q: Callable | None = None,
                 momentum: float = 0.0) -> None:
        self.step = getattr(self, scheme)
        self.ranks, self.feedback, self.first_q, self.momentum = ranks, feedback, first_q, momentum
        self.left: dict[tuple, np.ndarray] = {}

    def mean(self, name: str, grads: list[np.ndarray]) -> np.ndarray:
        return self.step(name, grads) if grads[0].size else grads[0]

    def _plus_left(self, key: tuple, x: np.ndarray) -> np.ndarray:
        return x + self.left.get(key, 0) if self.feedback else x

    def fp16(self, name, grads):
        return sum((g / self.ranks).astype(np.float16) for g in grads).astype(np.float32)

    def bf16(self, name, grads):
        return sum(torch.tensor(g / self.ranks).bfloat16() for g in grads).float().numpy()

    def onebit(self, name, grads):
        sent = []
        for rank, g in enumerate(grads):
            c = self._plus_left((rank, name), g)
            sent.append(np.abs(c).mean() * np.where(np.signbit(c), -1, 1))
            self.left[rank, name] = c - sent[-1]
        mean = self._plus_left(("second", name), sum(sent) / self.ranks)
        part = math.ceil(mean.size / (32 * self.ranks)) * 32
        out = np.concatenate([np.abs(m).mean() * np.where(np.signbit(m), -1, 1)
                              for m in np.split(mean, range(part, mean.size, part))])
        self.left["second", name] = mean - out
        return out

    def topk(self, name, grads):
        total = np.zeros_like(grads[0])
        for rank, g in enumerate(grads):
            u = self.momentum * self.left.get(("velocity", rank, name), 0) + g
            c = self._plus_left((rank, name), u)
            chosen = np.argsort(-np.abs(c))[:max(1, round(K * c.size))]
            total[chosen] += c[chosen] / self.ranks
            c[chosen] = u[chosen] = 0
            self.left[rank, name], self.left["velocity", rank, name] = c, u
        return total

    def powersgd(self, name, grads):
        shape = SHAPES[name]
        if len(shape) < 2:
            return sum(grads) / self.ranks
        n, m = shape[0], math.prod(shape[1:])
        r = min(n, m, RANK)
        if (n + m) * r * 2 >= n * m:
            return sum(grads) / self.ranks
        q = self.left.get(("q", name), self.first_q(name).numpy().reshape(m, r))
        cs = [self._plus_left((rank, name), g).reshape(n, m) for rank, g in enumerate(grads)]
        p = np.linalg.qr(sum(c @ q for c in cs))[0]
        qs = [c.T @ p for c in cs]
        for rank, (c, mine) in enumerate(zip(cs, qs)):
            self.left[rank, name] = (c - p @ mine.T).reshape(-1)
        self.left["q", name] = sum(qs) / self.ranks
        return (p @ self.left["q", name].T).reshape(-1)


def reference(scheme: str, ranks: int, updates: range, **options) -> list[dict[str, np.ndarray]]:
    ref = Reference(scheme, ranks, **options)
    grads = [[gradient(rank, update) for rank in range(ranks)] for update in updates]
    return [{n: ref.mean(n, [flat(g[n]) for g in every]) for n in SHAPES} for every in grads]
