"""What all tests share: those marked `gpu` skip where there is no GPU, those marked `timing` get another try."""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch sees no CUDA device, unless they are to run dry (`tests/gpu/given.py`).
    Torch is imported only if one was selected.

    Another process can spoil a comparison of seconds for a while; a fault of ours fails every time. So what fails
    under `timing` is run again after a pause, twice at most, and pytest's summary counts the reruns.
    """
    for item in items:
        if item.get_closest_marker("timing"):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=5, only_rerun=["AssertionError", "Failed"]))
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting or os.environ.get("COURSE_GPU_DRY"):
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))
