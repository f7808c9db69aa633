"""CUDA tensors on a wire: gloo copies them through the host, on a thread that knows no stream of whoever issued."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist


def devices_of(tensors: Any) -> Iterator[torch.device]:
    """The GPUs that hold them."""
    if isinstance(tensors, torch.Tensor):
        yield from [tensors.device] * tensors.is_cuda
    else:
        for tensor in tensors or ():
            yield from devices_of(tensor)


def in_order(start: Callable[[], dist.Work], tensors: Any) -> Callable[[], Any]:
    """`start`, to be called on another thread: what it begins comes after all that the current streams hold now, and
    when `wait()` of what it returns is over, the result is there for every stream."""
    written = {device: torch.cuda.current_stream(device).record_event() for device in devices_of(tensors)}
    return (lambda: _Begun(start, written)) if written else start


class _Begun:
    """A transfer with a stream of its own on each of its GPUs, so that it waits for no later compute."""

    def __init__(self, start: Callable[[], dist.Work], written: dict[torch.device, torch.cuda.Event]) -> None:
        self._streams = [torch.cuda.Stream(device) for device in written]
        for stream, event in zip(self._streams, written.values()):
            stream.wait_event(event)
        with self._current():
            self._work = start()

    def wait(self) -> None:
        with self._current():
            self._work.wait()  # lets these streams wait, not the host
        for stream in self._streams:
            stream.synchronize()

    def _current(self) -> ExitStack:
        stack = ExitStack()
        for stream in self._streams:
            stack.enter_context(torch.cuda.stream(stream))
        return stack
