"""What the parameters must be under delayed and under local updates: all ranks, one after the other, in one process.

Arguments as in `reference`: `windows[k][rank][i]` is micro-batch i of a rank in update k.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from course_lib.train.window import LossOf, micro_scale

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Windows = Sequence[Sequence[Sequence[Any]]]


def delayed_reference(make_model: Callable[[], nn.Module], windows: Windows, loss_of: LossOf,
                      make_optimizer: MakeOptimizer, delay: int, normalise: str = "tokens",
                      flush: bool = True) -> dict[str, torch.Tensor]:
    """Parameters by name when the gradient of update t is applied after window t + `delay`; with `flush`, those that
    are left are applied at the end, each in a step of its own."""
    model = make_model()
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(params)
    queue: deque[list[torch.Tensor | None]] = deque()

    def apply_oldest() -> None:
        for param, grad in zip(params, queue.popleft()):
            param.grad = grad
        optimizer.step()

    for window in windows:
        for param in params:
            param.grad = None
        for rank in range(len(window)):
            _backward(model, window, rank, loss_of, normalise)
        queue.append([p.grad for p in params])
        if len(queue) > delay:
            apply_oldest()
    while flush and queue:
        apply_oldest()
    return _named(model)


def local_reference(make_model: Callable[[], nn.Module], windows: Windows, loss_of: LossOf,
                    make_optimizer: MakeOptimizer, every: int, normalise: str = "tokens",
                    outer: tuple[float, float] | None = None) -> list[dict[str, torch.Tensor]]:
    """Parameters by name, one dictionary a rank, after local updates with a mean over ranks after each `every`.

    Without `outer` the mean is taken over (Local SGD; Stich, arXiv:1805.09767, eq. 2). With `outer=(lr, momentum)` it
    is DiLoCo (Douillard et al., arXiv:2311.08105, algorithm 1) with Nesterov momentum in PyTorch's form:
    Δ = θ_old − mean θ, m ← momentum·m + Δ, θ ← θ_old − lr·(Δ + momentum·m). Every rank keeps its optimizer's state.
    """
    models = [make_model() for _ in windows[0]]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    columns = list(zip(*([p for p in m.parameters() if p.requires_grad] for m in models)))
    optimizers = [make_optimizer([p for p in m.parameters() if p.requires_grad]) for m in models]
    olds = [column[0].detach().clone() for column in columns]
    moments = [torch.zeros_like(old) for old in olds]
    for k, window in enumerate(windows):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers)):
            _backward(model, window, rank, loss_of, normalise, len(window))
            optimizer.step()
            optimizer.zero_grad()
        if (k + 1) % every:
            continue
        for column, old, moment in zip(columns, olds, moments):
            mean = torch.stack([p.detach() for p in column]).mean(0)
            if outer is None:
                new = mean
            else:
                lr, momentum = outer
                moment.mul_(momentum).add_(old - mean)
                new = old - lr * (old - mean + momentum * moment)
            old.copy_(new)
            for param in column:
                param.data.copy_(new)
    return [_named(model) for model in models]


def _backward(model: nn.Module, window: Sequence[Sequence[Any]], rank: int, loss_of: LossOf, normalise: str,
              factor: float = 1.0) -> None:
    """Add `factor` times a rank's share of the window's loss to the gradients."""
    total = 0
    if normalise == "tokens":
        with torch.no_grad():
            total = sum(loss_of(model, batch)[1] for micros in window for batch in micros)
    for batch in window[rank]:
        summed, count = loss_of(model, batch)
        (factor * summed * micro_scale(normalise, count, len(window[rank]), total, len(window))).backward()


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
