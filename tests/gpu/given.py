"""Where these tests run: on GPUs, over NCCL.

`COURSE_GPU_DRY=4` runs them on the CPU instead, as if there were 4 GPUs. That shows whether the code of a test is right
and says nothing about a GPU.
"""

from __future__ import annotations

import os

import pytest

from course_lib.launch.fabric import gpus

DRY = int(os.environ.get("COURSE_GPU_DRY", "0"))
DEVICE, FABRIC = ("cpu", "loopback") if DRY else ("cuda", "nccl")
only_on_gpus = pytest.mark.skipif(DRY > 0, reason="nothing of it is left on a CPU")


def needs(count: int) -> pytest.MarkDecorator:
    there = DRY or gpus()
    return pytest.mark.skipif(there < count, reason=f"needs {count} CUDA devices, this machine shows {there}")


def on(*counts: int) -> list:
    """Values of a parameter `ranks`."""
    return [pytest.param(n, marks=needs(n)) for n in counts]


def exact() -> None:
    """First line on a rank: float32 is float32, and ranks on a CPU do not fight for it."""
    import torch
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.set_num_threads(1)


def moved(thing, device: str = DEVICE):
    """Tensors of a batch, a dictionary or a list of either, there."""
    import torch
    if torch.is_tensor(thing):
        return thing.detach().to(device)
    if isinstance(thing, dict):
        return {key: moved(value, device) for key, value in thing.items()}
    return type(thing)(moved(one, device) for one in thing) if isinstance(thing, list | tuple) else thing
