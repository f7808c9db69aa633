"""Matmuls that take a given time on the emulated device of their rank, as the layers of `train.emulated` do.

The arithmetic is real, and so are the collectives beside it. To keep the arithmetic small against the time given,
choose few outputs: what travels is rows times inputs, and does not depend on them.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.train.emulated import device

_MATMULS = {torch.ops.aten.mm: 0, torch.ops.aten.bmm: 0, torch.ops.aten.addmm: 1}
"""Each with the place of its left factor."""


class EmulatedMatmuls(TorchDispatchMode):
    """Inside this block a matmul of (m, k) by (k, n) takes m·k·n·`ns_per_product` nanoseconds of device time, in
    backward too. Raises `ValueError` on a negative time."""

    def __init__(self, ns_per_product: float) -> None:
        super().__init__()
        if ns_per_product < 0:
            raise ValueError(f"ns_per_product={ns_per_product}: a time is 0 or more")
        self.ns_per_product = ns_per_product

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        place = _MATMULS.get(func.overloadpacket)
        if place is not None:
            device.spend("matmul", round(args[place].numel() * args[place + 1].shape[-1] * self.ns_per_product))
        return out
