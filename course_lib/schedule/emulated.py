"""Stages that take a given time on the emulated device of their rank, with real parameters and gradients.

Unlike the layers of `train.emulated`, whose backward is one piece, these have a backward in two parts that can be
asked for apart, as zero-bubble schedules do.
"""

from __future__ import annotations

import torch
from torch import nn

from course_lib.train.emulated import device

_GAIN = 0.1


class _Input(torch.autograd.Function):
    """x + 0.1·sin x. The forward spends `F`, the backward `I`."""

    @staticmethod
    def forward(ctx, x, stage):
        ctx.save_for_backward(x)
        ctx.stage = stage
        device.spend("F", stage.ns["F"])
        return x + _GAIN * torch.sin(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        device.spend("I", ctx.stage.ns["I"])
        return grad * (1 + _GAIN * torch.cos(x)), None


class _Weight(torch.autograd.Function):
    """The mean of w·ramp, a number. The backward spends `W`."""

    @staticmethod
    def forward(ctx, weight, stage):
        ctx.stage, ctx.like = stage, weight
        return (weight * _ramp(weight)).mean()

    @staticmethod
    def backward(ctx, grad):
        device.spend("W", ctx.stage.ns["W"])
        return grad * _ramp(ctx.like) / ctx.like.numel(), None


def _ramp(like: torch.Tensor) -> torch.Tensor:
    """Different at every index, so that a gradient in the wrong place shows."""
    return torch.linspace(-1, 1, like.numel(), dtype=like.dtype)


class EmulatedStage(nn.Module):
    """Keeps the shape of its input. `elements` are those of its weight; times are ms of one micro-batch. A whole
    backward takes `input_ms + weight_ms`. Raises `ValueError` on a negative time or no elements."""

    def __init__(self, forward_ms: float, input_ms: float, weight_ms: float, elements: int = 1024) -> None:
        super().__init__()
        times = {"F": forward_ms, "I": input_ms, "W": weight_ms}
        for name, ms in times.items():
            if ms < 0:
                raise ValueError(f"{name} takes {ms} ms; a time is 0 or more")
        if elements < 1:
            raise ValueError(f"elements={elements}: a stage has at least one")
        self.ns = {name: round(ms * 1e6) for name, ms in times.items()}
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, elements))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.requires_grad:  # the layers inside the first stage need gradients of their inputs too
            x = x.detach().requires_grad_()
        return _Input.apply(x, self) + _Weight.apply(self.weight, self)
