"""Ranks in one process, a thread each, that meet in a mean. Nobody waits for ever for one who does not come."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LIMIT_S = 5.0


class Missing(Exception):
    """Not every rank came to a mean."""


class Meeting:
    """`mean(rank, step, tensor)` on `ranks` threads: a new tensor, the same on all. Ranks that come in different steps
    have missed each other."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._changed = ranks, threading.Condition()
        self._brought: dict[int, dict[int, tuple[int, Tensor]]] = defaultdict(dict)  # by number of mean, and rank
        self._calls = [0] * ranks
        self._left: set[int] = set()

    def mean(self, rank: int, step: int, tensor: Tensor) -> Tensor:
        import torch

        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"mean takes a tensor, not a {type(tensor).__name__}")
        with self._changed:
            brought = self._brought[self._calls[rank]]
            brought[rank] = step, tensor.detach().clone()
            self._calls[rank] += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(brought) == self._ranks or self._left - set(brought), LIMIT_S)
            if len(brought) < self._ranks:
                raise Missing("the other ranks did not come to this mean")
            steps = [brought[r][0] for r in range(self._ranks)]
            if len(set(steps)) > 1:
                raise Missing(f"rank 0, 1, … came to this mean in their steps {', '.join(str(s + 1) for s in steps)}")
            return torch.stack([brought[r][1] for r in range(self._ranks)]).mean(0)

    def leave(self, rank: int) -> None:
        """Whoever waits for this rank is told."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()


def play(function: Callable[[int, Meeting], Any], ranks: int) -> Sequence[Any]:
    """`function(rank, meeting)` on every rank, and what each returned. Raises what a rank raised, and `Missing` (or
    what came of it) only where nothing else went wrong."""
    meeting, results, failed = Meeting(ranks), [None] * ranks, []
    ended = [threading.Event() for _ in range(ranks)]

    def one(rank: int) -> None:
        try:
            results[rank] = function(rank, meeting)
        except BaseException as error:  # a stub's NotImplementedError too
            failed.append(error)
        finally:
            meeting.leave(rank)
            ended[rank].set()

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(ranks)]
    try:
        for thread in threads:
            thread.start()
        for event in ended:  # not join(): Python 3.11 takes a thread for ended whose join was interrupted
            event.wait()
    finally:  # the check's time limit may have ended the wait: then end what the learner's loop still does
        for thread, event in zip(threads, ended):
            if thread.ident is not None and not event.is_set():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    if failed:
        raise min(failed, key=lambda error: isinstance(error.__cause__ or error, Missing))
    return results
