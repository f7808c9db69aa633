"""A matmul and the collective beside it in chunks, so that one moves while the other computes.

The all-reduce of a tensor-parallel layer lies on the critical path: the next operator needs its result. What can be
hidden is hidden inside the operator: while chunk i is multiplied, chunk i + 1 is gathered or chunk i − 1 reduced. The
bytes are those of one collective; each chunk pays the latency once more. (The decomposition of Wang et al., "Overlap
Communication with Dependent Computation via Decomposition in Large Deep Learning Models", 2023.)

Ranks issue their chunks in the same order. The sequence is dimension −2, of `time` rows in all.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from course_lib.tensor.collective import InFlight, arrived, same_everywhere, start_gather, start_scatter
from course_lib.tensor.shard import place, share


def gather_linear(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup | None,
                  chunks: int = 1) -> torch.Tensor:
    """All-gather, then matmul: (…, time/ranks, in) and (out, in) to (…, time, out).

    Backward multiplies and reduce-scatters in as many chunks. Keeps the gathered activations for the gradient of the
    weight, so that backward moves no byte twice.
    """
    return _GatherLinear.apply(*_autocast(x, weight), group, _checked(chunks))


def linear_scatter(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup | None,
                   chunks: int = 1) -> torch.Tensor:
    """Matmul, then reduce-scatter of the partial sums: (…, time, in) and (out, in) to (…, time/ranks, out).

    Backward all-gathers and multiplies in as many chunks. Raises `ValueError` where the ranks do not divide `time`.
    """
    same_everywhere(x, group)
    share(x.shape[-2], group, "the length of the sequence")
    return _LinearScatter.apply(*_autocast(x, weight), group, _checked(chunks))


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group, chunks):
        ctx.group, ctx.chunks = group, chunks
        wholes, products = [], []
        for whole in _arriving(x, group, chunks):
            wholes.append(whole)
            products.append(whole @ weight.t())
        ctx.save_for_backward(torch.cat(wholes, dim=-2) if ctx.needs_input_grad[1] else None, weight)
        return _in_sequence(products)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        whole, weight = ctx.saved_tensors
        grad = _by_rank(grad, ctx.group)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            parts = [start_scatter(part @ weight, ctx.group) for part in _cut(grad, ctx.chunks)]
        if ctx.needs_input_grad[1]:  # while the last chunks are on their way
            grad_weight = _outer(grad, whole)
        if ctx.needs_input_grad[0]:
            grad_x = _left(parts)
        return grad_x, grad_weight, None, None


class _LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group, chunks):
        ctx.group, ctx.chunks = group, chunks
        ctx.save_for_backward(x, weight)
        return _left([start_scatter(part @ weight.t(), group) for part in _cut(_by_rank(x, group), chunks)])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = [], torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        parts = _cut(_by_rank(x, ctx.group), ctx.chunks)
        for whole, part in zip(_arriving(grad, ctx.group, ctx.chunks), parts, strict=True):
            grad_x.append(whole @ weight)
            if grad_weight is not None:
                grad_weight += _outer(whole, part)
        return _in_sequence(grad_x), grad_weight, None, None


def _checked(chunks: int) -> int:
    if not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"chunks={chunks!r}: give a whole number of at least 1")
    return chunks


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In the dtype of an autocast region, as F.linear would have them: cast before they are sent."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


def _cut(x: torch.Tensor, chunks: int) -> list[torch.Tensor]:
    """Chunks of dimension −2, as equal as can be and none empty: the same on every rank."""
    return list(x.tensor_split(max(1, min(chunks, x.shape[-2])), dim=-2))


def _by_rank(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """(…, time, width) as (ranks, …, time/ranks, width): whose rows they are comes first."""
    return x.unflatten(-2, (place(group)[1], -1)).movedim(-3, 0)


def _in_sequence(chunks: list[torch.Tensor]) -> torch.Tensor:
    """Chunks (ranks, …, rows, width) as one tensor (…, time, width)."""
    return torch.cat(chunks, dim=-2).movedim(0, -3).flatten(-3, -2)


def _outer(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Σ over all rows of a row of `a` times a row of `b`: the gradient of a weight."""
    return a.flatten(0, -2).t() @ b.flatten(0, -2)


def _arriving(x: torch.Tensor, group: dist.ProcessGroup | None, chunks: int) -> Iterator[torch.Tensor]:
    """Each chunk of all ranks, (ranks, …, rows, width), once it is there; the next one is on its way by then."""
    same_everywhere(x, group)
    first, *others = _cut(x, chunks)
    coming = start_gather(first, group)
    for part in others:
        flight, coming = coming, start_gather(part, group)
        yield arrived(flight)
    yield arrived(coming)


def _left(parts: list[InFlight]) -> torch.Tensor:
    """The summed chunks as one tensor (…, time/ranks, width)."""
    return torch.cat([arrived(part) for part in parts], dim=-2)
