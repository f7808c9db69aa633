"""What a transfer weighs: the bytes of its tensors, and how many of them a rank sends."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

SHARE = {  # bytes a rank sends, as a multiple of the full payload S, for n ranks
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0 if n > 1 else 0.0,
    "reduce": lambda n: 1.0 if n > 1 else 0.0,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "send": lambda n: 1.0,
    "recv": lambda n: 0.0,
    "barrier": lambda n: 0.0,
}


@dataclass
class Traffic:
    """What this rank's wire carried: collectives by name, and bytes sent by the formula of a ring."""

    calls: Counter = field(default_factory=Counter)
    bytes: Counter = field(default_factory=Counter)

    @property
    def total_bytes(self) -> float:
        return sum(self.bytes.values())

    def reset(self) -> None:
        self.calls.clear()
        self.bytes.clear()


def payload_bytes(tensors: Any) -> int:
    """Raises `ValueError` for a tensor that gloo cannot reach."""
    if isinstance(tensors, torch.Tensor):
        if tensors.device.type not in ("cpu", "cuda"):
            raise ValueError(f"a wire carries CPU and CUDA tensors, and was given one on {tensors.device}")
        return tensors.numel() * tensors.element_size()
    return sum(payload_bytes(t) for t in tensors or ())
