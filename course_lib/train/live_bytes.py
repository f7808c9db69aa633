"""How much memory tensors take: every storage that an operator of this thread has seen, as long as it lives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Adds up the storages of all tensors that operators of this thread have read or made, after each operator, as long
    as they live and in the size that they have then; `peak` is the most. What a collective's own thread allocates is
    not seen, and is the same for all who use that collective."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._storages = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor):
                storage = (leaf._local_tensor if isinstance(leaf, DTensor) else leaf).untyped_storage()
                self._storages.setdefault(storage._cdata, StorageWeakRef(storage))
        self.peak = max(self.peak, sum(self.alive().values()))
        return out

    def alive(self) -> dict[int, int]:
        """Bytes of each storage that is alive now, by its `_cdata`."""
        found = {key: torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for key, ref in self._storages.items()}
        for key in [key for key, storage in found.items() if storage is None]:
            del self._storages[key]
        return {key: storage.nbytes() for key, storage in found.items() if storage is not None}


def peak_bytes(step: Callable[[], None], warmup: int = 2) -> int:
    """Bytes of tensors that are live at most during a step, those from before included."""
    for _ in range(warmup):
        step()
    with LiveBytes() as counter:
        step()
    return counter.peak
