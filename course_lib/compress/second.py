"""Where second phases are issued: on a group of their own, in bucket order, by a thread of their own.

Phase 2 of a bucket needs the result of its phase 1, which is there at another moment on every rank. Two rules
keep ranks that differ in time from ever waiting for each other in a circle. Collectives of one group are issued
in the same order on every rank: phase 1 by the backward pass, phase 2 by a thread that takes the buckets in the
order of their phase 1, whatever has finished first. And the two groups share no queue: phase 1 never waits for a
phase 2, so every phase 1 comes to its end, and with it every phase 2. A collective awaited in a future's
callback has neither: the thread that runs callbacks would wait for a collective that only it can complete.

NCCL needs none of this (`Compressor` issues both phases at once on one stream, where the host waits for nobody).
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable

import torch.distributed as dist

from course_lib.launch.wire import Wire

_of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, Second] = weakref.WeakKeyDictionary()


class Second:
    """The group beside another one, and the thread that runs what `put` gives it, in order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        backend = "wire" if isinstance(group, Wire) else "gloo"
        if len(ranks) == dist.get_world_size():
            self.group = dist.new_group(backend=backend)
        else:
            self.group = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
        if isinstance(self.group, Wire):
            # its own also beside other second groups: each has a thread, and their order is another on every rank
            self.group.queue = f"second phase in {self.group.getGroupName()}"
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._tasks,), name="second phase", daemon=True)
        self._thread.start()
        weakref.finalize(group, self._tasks.put, None)
        # A thread inside torch while the interpreter goes down would abort the process.
        atexit.register(self._close)

    def put(self, task: Callable[[], None]) -> None:
        """Run `task` after all that were put before. It may wait for collectives, and must not raise."""
        self._tasks.put(task)

    def _close(self) -> None:
        self._tasks.put(None)
        self._thread.join(5.0)


def second(group: dist.ProcessGroup) -> Second:
    """The `Second` of a group, made once; a collective call the first time."""
    if group not in _of_group:
        _of_group[group] = Second(group)
    return _of_group[group]


def _run(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task
