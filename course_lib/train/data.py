"""Data without downloads: the Python standard library's own sources as text, and a small exact task."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch

MB = 2**20
IGNORE = -100
"""The target that `torch.nn.functional.cross_entropy` leaves out."""

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}

Batch = tuple[torch.Tensor, torch.Tensor]


@lru_cache(maxsize=4)
def text(max_mb: float = 4.0) -> torch.Tensor:
    """Bytes of the standard library's .py files, in the order of their paths, at most `max_mb` MB (2**20).

    1-D uint8, the same for the same Python. Packages installed beside the library, its tests and its IDE
    are left out. Raises `FileNotFoundError` where Python was installed without sources.
    """
    if not max_mb > 0:
        raise ValueError(f"max_mb={max_mb}: give a size above 0")
    root, limit = sysconfig.get_paths()["stdlib"], int(max_mb * MB)
    out = bytearray()
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        for name in sorted(f for f in files if f.endswith(".py")):
            if len(out) < limit:
                out += Path(folder, name).read_bytes()
        if len(out) >= limit:
            break
    if not out:
        raise FileNotFoundError(f"no .py files under {root}: this Python has no standard library sources to read")
    return torch.frombuffer(out[:limit], dtype=torch.uint8)


def batches(data: torch.Tensor, batch: int, length: int, steps: int, *, seed: int = 0, rank: int = 0,
            ragged: bool = False) -> Iterator[Batch]:
    """`steps` micro-batches (x, y) of byte values, each int64 of shape (batch, length); y is x one byte on.

    Deterministic: the same (seed, rank) gives the same batches, another rank other ones. With `ragged=True`
    each row keeps a random number of targets, at least one; the rest are `IGNORE`. Raises `ValueError`
    if the data is shorter than length + 1.
    """
    if len(data) <= length:
        raise ValueError(f"{len(data)} bytes of data are too few for rows of {length} + 1; shorten length")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    reach = torch.arange(length + 1)
    for _ in range(steps):
        start = torch.randint(len(data) - length, (batch, 1), generator=generator)
        rows = data[start + reach].long()
        x, y = rows[:, :-1], rows[:, 1:].clone()
        if ragged:
            kept = torch.randint(1, length + 1, (batch, 1), generator=generator)
            y[reach[:-1] >= kept] = IGNORE
        yield x, y


def terms_of(targets: torch.Tensor) -> int | torch.Tensor:
    """How many of them count in the loss; on a GPU a tensor there, so that the host need not wait to hear it."""
    count = (targets != IGNORE).sum()
    return count if count.is_cuda else int(count)


def count_of(batch: Batch) -> int:
    """Targets of a micro-batch that count in the loss."""
    return int(terms_of(batch[1]))


def synthetic(batch: int, features: int, steps: int, *, seed: int = 0, rank: int = 0) -> Iterator[Batch]:
    """Micro-batches of an exactly solvable task: y = x·w with a fixed w, no noise. x is (batch, features) and
    y is (batch, 1), float32; w depends on `features` alone, x on (seed, rank)."""
    weights = torch.linspace(-1, 1, features).unsqueeze(1)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    for _ in range(steps):
        x = torch.randn(batch, features, generator=generator)
        yield x, x @ weights
