"""The next batch on its way while the present one is computed: overlap on the wire between host and device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from course_lib.record import active, now


class Prefetch:
    """Iterate over `loader` with batches read, and copied to `device`, ahead of their use: `depth` that wait, and the
    one that the reader has at hand meanwhile.

    Reading runs in a thread, one per iteration, so it overlaps compute that releases the interpreter lock (torch
    operators, sleeping, a device). A `DataLoader` with workers does the same in processes; wrapped in this class it
    gains the copy.

    On CUDA each batch goes through page-locked memory and is copied on a stream of its own. From pageable memory the
    same call would block the thread and overlap nothing. The consumer's stream waits for the copy's event before it
    reads, and the batch is recorded on that stream, so that its memory is not given away while it is read.

    A batch is a tensor or tuples, lists and dicts of tensors; what is no tensor passes through. Order and number are
    the loader's. An exception of the loader comes out where its batch would have, `TimeoutError` if no batch came
    within `timeout_s`, `ValueError` on a depth below 1.
    """

    def __init__(self, loader: Iterable[Any], device: str | torch.device = "cpu", depth: int = 2,
                 timeout_s: float = 60.0) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth}: keep at least one batch ahead")
        self.loader, self.device, self.depth, self.timeout_s = loader, torch.device(device), depth, timeout_s

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        ready: queue.Queue = queue.Queue(self.depth)
        stop = threading.Event()
        copier = _Copier(self.device) if self.device.type == "cuda" else None
        reader = threading.Thread(target=_read, args=(self.loader, copier, ready, stop), name="prefetch", daemon=True)
        reader.start()
        try:
            while True:
                kind, value = self._next(ready)
                if kind == "end":
                    return
                if kind == "error":
                    raise value
                yield copier.arrived(*value) if copier else value
        finally:  # also when the loop is left early: the reader sees it at its next batch
            stop.set()

    def _next(self, ready: queue.Queue) -> tuple[str, Any]:
        try:
            return ready.get(timeout=self.timeout_s)
        except queue.Empty:
            raise TimeoutError(f"the loader gave no batch within {self.timeout_s:g} s: is its source stuck? A slower "
                               "one needs a larger timeout_s") from None


def _read(loader: Iterable[Any], copier: _Copier | None, ready: queue.Queue, stop: threading.Event) -> None:
    def put(*item: Any) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.05)
                return True
            except queue.Full:
                pass
        return False

    try:
        batches = iter(loader)
        while True:
            start = now()
            try:
                batch = next(batches)
            except StopIteration:
                break
            if (recorder := active()) is not None:
                recorder.add("host", "reader", "read", start, now())
            if not put("batch", copier.send(batch) if copier else batch):
                return
    except BaseException as error:
        put("error", error)
    else:
        put("end", None)


class _Copier:
    """Copies on a stream of their own. Written to CUDA's rules and never run in the making of this course: there was no
    GPU. `tests/gpu` runs it where there is one."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def send(self, batch: Any) -> tuple[Any, torch.cuda.Event]:
        """Start the copy; the batch on the device, and the event after which it may be read."""
        pinned = _map(batch, torch.Tensor.pin_memory)
        event = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            # the caching host allocator keeps page-locked memory from reuse until copies issued from it have ended
            moved = _map(pinned, lambda t: t.to(self._device, non_blocking=True))
            event.record()
        return moved, event

    def arrived(self, batch: Any, event: torch.cuda.Event) -> Any:
        """Make the consumer's stream wait, not the host."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        _map(batch, lambda t: t.record_stream(stream))
        return batch


def _map(batch: Any, of: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(batch, torch.Tensor):
        return of(batch)
    if isinstance(batch, dict):
        return {key: _map(value, of) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(value, of) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(_map(value, of) for value in batch)
    return batch
