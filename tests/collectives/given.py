"""What the tests of collectives share: tensors whose sums are known, and the collectives by name."""

from __future__ import annotations

import torch


def part(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """This rank's summand: small whole numbers, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    return torch.randint(-8, 9, (numel,), generator=generator).to(dtype)


def rough(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A summand whose sums round, so that the order of the additions shows."""
    generator = torch.Generator().manual_seed(7 * numel + rank)
    return torch.randn(numel, generator=generator).mul(10.0 ** (rank % 3)).to(dtype)
