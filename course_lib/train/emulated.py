"""Emulated devices: layers with real parameters and real gradients that take a *given* time.

Two cores cannot run several ranks of real compute without a fight for the cores, and the fight would
drown what a lab wants to show. An emulated layer does a little real arithmetic and then sleeps until a
device that needs exactly `forward_ms` or `backward_ms` would be done. Each rank has one such device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn
from torch.profiler import record_function

from course_lib import record
from course_lib.labels import emulated_label
from course_lib.record import now

MB = 2**20
PROVENANCE = "measured (real wires, emulated device)"

_SLACK_NS = 2_000_000
_GAIN = 0.1


@dataclass
class DeviceClock:
    """Until when the device of this rank is busy, in ns of the recorder's clock.

    Work starts when the device is free, or up to 2 ms before now: a host that is late by less than that
    (a sleep that overran, the arithmetic itself) does not slow the device, as a queue would hide it. Sleeping
    to absolute deadlines keeps the errors of many sleeps from adding up.
    """

    busy_until: int = 0

    def spend(self, name: str, duration_ns: int) -> None:
        """Block for `duration_ns` of device time; record it as compute on lane `device`."""
        start = max(self.busy_until, now() - _SLACK_NS)
        self.busy_until = stop = start + duration_ns
        with record_function(emulated_label(name, duration_ns)):
            if (left := stop - now()) > 0:
                time.sleep(left / 1e9)
        if (recorder := record.active()) is not None:
            recorder.add("compute", "device", name, start, stop)


device = DeviceClock()
"""The emulated device of this process, which is one rank."""


@lru_cache(maxsize=64)
def _direction(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A fixed vector that is different at every index, so that a gradient in the wrong place shows.
    Root mean square 1 before division by the square root of the size."""
    n = max(1, shape.numel())
    wave = torch.arange(n, dtype=torch.float32).mul_(0.7548776662).add_(0.3).cos_().mul_((2 / n) ** 0.5)
    return wave[:shape.numel()].view(shape).to(dtype)


class _Layer(torch.autograd.Function):
    """y = x + 0.1·sin(x + Σ w·d) with d = `_direction`; forward and backward each take their time."""

    @staticmethod
    def forward(ctx, x, layer, *params):
        shift = sum(torch.sum(p * _direction(p.shape, p.dtype), dtype=torch.float32) for p in params)
        inner = x + torch.as_tensor(shift, dtype=x.dtype)
        ctx.save_for_backward(inner)
        ctx.layer, ctx.like = layer, [(p.shape, p.dtype) for p in params]
        y = x + _GAIN * torch.sin(inner)
        device.spend(f"forward {layer.name}", layer.forward_ns)
        return y

    @staticmethod
    def backward(ctx, grad):
        (inner,) = ctx.saved_tensors
        local = grad * (_GAIN * torch.cos(inner))
        total = float(local.sum())
        grads = [_direction(shape, dtype) * total if wanted else None
                 for (shape, dtype), wanted in zip(ctx.like, ctx.needs_input_grad[2:])]
        device.spend(f"backward {ctx.layer.name}", ctx.layer.backward_ns)
        return (grad + local if ctx.needs_input_grad[0] else None, None, *grads)


class EmulatedLayer(nn.Module):
    """Keeps the shape of its input. `sizes` are the elements of its parameters (their gradients become
    ready together, when the backward time is over); times are in ms. Raises `ValueError` on a negative one."""

    def __init__(self, sizes: Sequence[int], forward_ms: float, backward_ms: float, name: str = "",
                 dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if forward_ms < 0 or backward_ms < 0:
            raise ValueError(f"layer {name!r}: forward_ms={forward_ms}, backward_ms={backward_ms}; a time is 0 or more")
        self.name, self.forward_ns, self.backward_ns = name, round(forward_ms * 1e6), round(backward_ms * 1e6)
        self.weights = nn.ParameterList([
            nn.Parameter(_direction(torch.Size((n,)), torch.float32).roll(1 + i).to(dtype))
            for i, n in enumerate(sizes)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Layer.apply(x, self, *self.weights)


class Emulated(nn.Sequential):
    """A stack of emulated layers, input first. `forward_ms` and `backward_ms` are the sums over the layers.

    >>> model = equal(layers=2, mb=0.001, forward_ms=0, backward_ms=0)
    >>> loss = model(torch.ones(4)).square().mean()
    """

    def __init__(self, layers: Sequence[EmulatedLayer]) -> None:
        super().__init__(*layers)
        for i, layer in enumerate(layers):
            layer.name = layer.name or f"layer {i}"

    @property
    def forward_ms(self) -> float:
        return sum(layer.forward_ns for layer in self) / 1e6

    @property
    def backward_ms(self) -> float:
        return sum(layer.backward_ns for layer in self) / 1e6


def equal(layers: int = 16, mb: float = 1.0, forward_ms: float = 4.0, backward_ms: float = 8.0,
          parameters: int = 1, scales: Sequence[float] | None = None, dtype: torch.dtype = torch.float32) -> Emulated:
    """`layers` layers of `mb` MB (2**20 bytes) each, in `parameters` parameters. Times are per layer, in ms,
    multiplied by `scales[i]` where given."""
    scales = [1.0] * layers if scales is None else scales
    if layers < 1 or len(scales) != layers:
        raise ValueError(f"{layers} layers and {len(scales)} scales: give one scale for each of at least one layer")
    elements = round(mb * MB / dtype.itemsize)
    sizes = [elements // parameters + (i < elements % parameters) for i in range(parameters)]
    return Emulated([EmulatedLayer(sizes, forward_ms * s, backward_ms * s, dtype=dtype) for s in scales])


def gpt_like(hidden: int = 256, vocab: int = 8192, blocks: int = 6, scale: float = 1.0,
             dtype: torch.dtype = torch.float32) -> Emulated:
    """The size profile of a GPT with tied embedding: its large gradient is ready last, when nothing is left
    to hide it. An attention and an MLP layer a block, two parameters each; `scale` multiplies all times."""
    h = hidden
    layers = [EmulatedLayer([vocab * h], 2 * scale, 6 * scale, "embedding", dtype)]
    for i in range(blocks):
        layers.append(EmulatedLayer([3 * h * h, h * h], 5 * scale, 10 * scale, f"attention {i}", dtype))
        layers.append(EmulatedLayer([4 * h * h, 4 * h * h], 7 * scale, 14 * scale, f"mlp {i}", dtype))
    return Emulated(layers)
