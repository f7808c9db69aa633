"""The control channel: a few bytes from every rank to every rank, off the wire that carries gradients.

A rank that skipped its backward pass issues fewer collectives than the others, and the next one it
issues pairs up with the wrong one. So before anybody waits for gradients, all ranks compare notes here.
"""

from __future__ import annotations

import re
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from course_lib.launch import control_group

_FRAME, _TITLE, _LENGTH = 256, 64, 8
"""Bytes: what travels is a multiple of the first, and begins with where its rank is and how long its payload is. gloo
ends the process where the lengths of an exchange differ."""

_of_group: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class SynchronizationError(RuntimeError):
    """The ranks do not agree about what they have done. Raised on every rank, with the same sentence."""


class Absent(SynchronizationError):
    """Some ranks did not come. Raised on those that waited."""


class Control:
    """Exchanges small byte strings among the ranks of `group`. Every rank must make the same calls."""

    timeout_s = 300.0
    """How long to wait for a rank that does not come. Longer than any honest pause in a step."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.size, self.index = len(self.ranks), dist.get_rank(group)
        self._calls = 0
        self._channel = _channel(group, self.ranks) if self.size > 1 else None

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        """Everybody's payload, in rank order; all must have about the same length. Waits for all ranks. Raises
        `SynchronizationError` naming the ranks that did not come within `timeout_s`, or came from another place in
        the program; `what` says to what."""
        if self._channel is None:
            return [payload]
        self._calls += 1
        frame = what.encode()[:_TITLE].ljust(_TITLE, b"\0") + len(payload).to_bytes(_LENGTH, "little") + payload
        mine = torch.frombuffer(bytearray(frame + bytes(-len(frame) % _FRAME)), dtype=torch.uint8)
        theirs = list(torch.empty(self.size, len(mine), dtype=torch.uint8))
        try:
            dist.all_gather(theirs, mine, group=self._channel, async_op=True).wait(timedelta(seconds=self.timeout_s))
        except (RuntimeError, TimeoutError) as error:
            raise Absent(self._absent(what, error)) from error
        frames = [bytes(t.numpy()) for t in theirs]
        titles = [frame[:_TITLE].rstrip(b"\0").decode(errors="replace") for frame in frames]
        if len(set(map(_place, titles))) > 1:
            where = ", ".join(f"rank {rank} at {title}" for rank, title in zip(self.ranks, titles))
            raise SynchronizationError(f"the ranks are at different places ({where}); make the same calls, as "
                                       "often, on every rank")
        start = _TITLE + _LENGTH
        return [frame[start:start + int.from_bytes(frame[_TITLE:start], "little")] for frame in frames]

    def _absent(self, what: str, error: Exception) -> str:
        """Who is missing? Those who wait sign a list in the store; whoever has not signed is not here."""
        store = dist.distributed_c10d._get_default_store()
        name = f"course_lib/train/{self.ranks}/{self._calls}"
        try:
            store.set(f"{name}/{self.index}", b"here")
            time.sleep(min(2.0, self.timeout_s / 2))
            missing = [r for i, r in enumerate(self.ranks) if not store.check([f"{name}/{i}"])]
        except RuntimeError:
            missing = []
        me = f"rank {self.ranks[self.index]}"
        who = ranks_text(missing) if missing else "another rank"
        return (f"{me} waited for {who} at {what}, but {who} did not come within {self.timeout_s:g} s or has ended "
                f"({str(error).splitlines()[0]}). Every rank must run the same number of windows.")


def _place(title: str) -> str:
    """What two ranks must have in common to be told what differs by those who compare the payloads."""
    return "the start" if title.startswith("the start of ") else re.sub(r"\d+", "", title)


def _channel(group: dist.ProcessGroup, ranks: list[int]) -> dist.ProcessGroup:
    """The plain gloo group beside `group`, made once."""
    if group not in _of_group:
        everyone = len(ranks) == dist.get_world_size()
        _of_group[group] = control_group() if everyone else dist.new_group(
            ranks, backend="gloo", use_local_synchronization=True)
    return _of_group[group]


def ranks_text(ranks: list[int]) -> str:
    """`rank 1`, `ranks 1 and 3`, `ranks 0, 1 and 3`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
