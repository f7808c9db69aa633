"""What compression over NCCL asks of a GPU: a stream beside that of the backward pass, and one answer without haste."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """On a stream of its own, after all that the current one was given so far."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


def answer(finite: torch.Tensor) -> Callable[[], bool]:
    """Called, it waits until the current stream has come to here, and reads."""
    here = torch.cuda.Event()
    here.record()

    def read() -> bool:
        here.synchronize()
        return bool(finite)

    return read
