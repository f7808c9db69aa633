"""Prefetch on CUDA: copies under compute, right numbers, memory that is not given away while it is read."""

from __future__ import annotations

import pytest
import torch

from course_lib.train.prefetch import Prefetch
from tests.gpu.given import only_on_gpus

pytestmark = [pytest.mark.gpu, only_on_gpus]


def test_every_batch_arrives_whole_under_a_busy_stream() -> None:
    """Compute is slower than the copies, so that each copy would overwrite what is read if memory were reused early."""
    size, count = 4 << 20, 40
    busy = torch.randn(2048, 2048, device="cuda")
    sums = []
    for batch in Prefetch((torch.full((size,), float(i)) for i in range(count)), "cuda"):
        busy = busy @ busy / 2048
        sums.append((batch.min(), batch.max()))
        del batch
    assert [(float(a), float(b)) for a, b in sums] == [(i, i) for i in range(count)]


def test_copies_run_on_a_stream_of_their_own() -> None:
    batch = next(iter(Prefetch([{"x": torch.ones(8), "name": "a"}], "cuda")))
    assert batch["x"].is_cuda and batch["name"] == "a" and batch["x"].sum().item() == 8
