"""A backward pass of a compressor, from its first bucket until all have arrived: it counts as a whole or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from course_lib.compress.memory import Memory
from course_lib.train.bucket import Bucket


class Window:
    """What is written to `memories` in a pass holds once every bucket of it has arrived with finite numbers.

    On a GPU whether they are finite is not known when the host has issued everything: such a pass holds until
    `judge()` has read the answers, and is taken back then if one of them is no.
    """

    def __init__(self, memories: Mapping[str, Memory]) -> None:
        self.updates = 0
        """Passes that hold."""
        self._memories, self._lock = memories, threading.Lock()
        self._flying, self._index, self._last, self._spoilt, self._holds = 0, -1, False, False, False
        self._doubts: list[tuple[Callable[[], bool], Callable[[], Exception]]] = []

    def enter(self, bucket: Bucket) -> bool:
        """A bucket sets out. Is it the first of a pass?"""
        if self._index < 0:
            self.judge()  # of the pass before, if nobody has asked yet
        with self._lock:
            if bucket.index() <= self._index:  # the last backward never came to its end, and its window was dropped
                self._doubts.clear()
                self._forget()
            first = self._index < 0
            self._flying += 1
            self._holds = False
            self._index, self._last = bucket.index(), bucket.is_last()
            return first

    def leave(self, finite: bool) -> None:
        """A bucket has arrived; with the last of them the pass ends."""
        with self._lock:
            self._flying -= 1
            self._spoilt |= not finite
            if self._flying or not self._last:
                return
            if not self._spoilt:
                self.updates += 1
                self._holds = True
                for memory in self._memories.values():
                    memory.commit()
            self._forget()

    def doubt(self, answer: Callable[[], bool], error: Callable[[], Exception]) -> bool:
        """`answer()` waits, and says whether a bucket's numbers are finite. Is this the only doubt so far?"""
        with self._lock:
            self._doubts.append((answer, error))
            return len(self._doubts) == 1

    def judge(self) -> Exception | None:
        """Read all answers; the first error, if the pass is taken back."""
        with self._lock:
            doubts, self._doubts = self._doubts, []
            bad = [error for answer, error in doubts if not answer()]
            if not bad:
                return None
            self._spoilt |= self._index >= 0
            self._undo()
        return bad[0]()

    def take_back(self) -> None:
        """The last pass never was. Nothing of it is on its way any more."""
        with self._lock:
            self._doubts.clear()
            self._undo()
            self._forget()

    def restart(self, updates: int) -> None:
        """The memories were loaded, with what they were after so many updates."""
        with self._lock:
            self._doubts.clear()
            self.updates, self._holds = updates, False
            self._forget()

    def _undo(self) -> None:
        self.updates -= self._holds
        for memory in self._memories.values() if self._holds else ():
            memory.take_back()
        self._holds = False

    def _forget(self) -> None:
        for memory in self._memories.values():
            memory.discard()
        self._index, self._last, self._spoilt = -1, False, False
