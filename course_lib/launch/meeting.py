"""Where the ranks of a torchrun job meet when some of them have been started again.

Ranks find each other's addresses in a store that outlives them. torch keeps the starts of a job apart there by the
number of restarts, but each node counts its own: a node that starts its ranks again because another node lost one does
not count that. Its new ranks then read what dead ones wrote, and try to reach them.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_NAME = "course_lib/launch"
_LOOK_EVERY_S = 0.02


def meet(store: dist.Store, rank: int, ranks: int, timeout_s: float) -> dist.Store:
    """A part of `store` that nobody has written to but the ranks that call this now. Every rank calls it.

    Rank 0 takes a new number and tells it to whoever says to be here; only one that lives says that it has heard it.
    Raises `TimeoutError` naming the ranks that did not come within `timeout_s`.
    """
    if rank == 0:
        number = store.add(f"{_NAME}/number", 1)
        _wait_for_all(store, number, ranks, timeout_s)
    else:
        me = uuid.uuid4().hex
        store.set(f"{_NAME}/here/{rank}", me)
        try:
            store.wait([f"{_NAME}/number for/{me}"], timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise TimeoutError(f"rank {rank} waited {timeout_s:g} s for rank 0, which did not start") from error
        number = int(store.get(f"{_NAME}/number for/{me}"))
        store.set(f"{_NAME}/heard/{me}/{number}", b"")
    return dist.PrefixStore(f"{_NAME}/{number}", store)


def _wait_for_all(store: dist.Store, number: int, ranks: int, timeout_s: float) -> None:
    told: dict[int, str] = {}
    missing, end = set(range(1, ranks)), time.monotonic() + timeout_s
    while missing:
        for rank in sorted(missing):
            if not store.check([f"{_NAME}/here/{rank}"]):
                continue
            who = store.get(f"{_NAME}/here/{rank}").decode()
            if told.get(rank) != who:
                store.set(f"{_NAME}/number for/{who}", str(number))
                told[rank] = who
            elif store.check([f"{_NAME}/heard/{who}/{number}"]):
                missing.remove(rank)
        if missing and time.monotonic() > end:
            raise TimeoutError(f"rank 0 waited {timeout_s:g} s for ranks {sorted(missing)}, which did not start; see "
                               "what torchrun says on their nodes")
        time.sleep(_LOOK_EVERY_S if missing else 0)
