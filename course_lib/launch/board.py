"""A shared page on which every rank writes what its wires are doing, so that a stuck run can be explained."""

from __future__ import annotations

import itertools
import json
import mmap
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

_SLOT, _SLOTS = 512, 32
_HEAD = struct.Struct("<qqdH")  # entered, finished, time of the last change, length of the rest


@dataclass(frozen=True)
class Status:
    """One rank on one lane. `entered` and `finished` count what it did there; `text` describes the one entered
    last. `members` are the ranks of the group, and `None` on a lane of sends or receives, where ranks count apart."""

    rank: int
    lane: str
    members: tuple[int, ...] | None
    entered: int
    finished: int
    changed: float
    text: str

    @property
    def inside(self) -> bool:
        return self.entered > self.finished

    def sentence(self) -> str:
        state = "is still inside" if self.inside else "has finished"
        what = f"collective #{self.entered} ({self.text})" if self.members else f"{self.text} (#{self.entered})"
        return f"rank {self.rank} {state} {what} for {time.monotonic() - self.changed:.1f} s"


class Board:
    """Slots for every rank in anonymous shared memory, one a lane; create before forking the ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._page = mmap.mmap(-1, max(1, ranks) * _SLOTS * _SLOT)
        self._slot_of: dict[str, int] = {}
        self._next = itertools.count()  # lanes belong to different threads
        self._shared = "", False

    def write(self, rank: int, lane: str, members: Sequence[int] | None, entered: int, finished: int,
              text: str) -> None:
        """Only `rank` itself writes, so it alone hands out its slots. Beyond the last one, lanes share it."""
        if lane not in self._slot_of:
            self._slot_of[lane] = min(next(self._next), _SLOTS - 1)
        if self._slot_of[lane] == _SLOTS - 1:
            held, stuck = self._shared
            if stuck and held != lane:
                return  # of the lanes that share the last slot, none may hide one that is inside
            self._shared = lane, entered > finished
        rest = _packed(lane, "all" if members and len(members) == self.ranks else members, text)
        at = (rank * _SLOTS + self._slot_of[lane]) * _SLOT
        self._page[at: at + _HEAD.size + len(rest)] = _HEAD.pack(entered, finished, time.monotonic(), len(rest)) + rest

    def read(self, rank: int) -> list[Status]:
        """The lanes that a rank has used, the one it changed last first."""
        found = []
        for slot in range(_SLOTS):
            at = (rank * _SLOTS + slot) * _SLOT
            entered, finished, changed, size = _HEAD.unpack(self._page[at: at + _HEAD.size])
            if not size:
                break
            try:
                lane, members, text = json.loads(self._page[at + _HEAD.size: at + _HEAD.size + size])
            except ValueError:  # it is being written at this moment
                continue
            who = range(self.ranks) if members == "all" else members
            found.append(Status(rank, lane, None if who is None else tuple(who), entered, finished, changed, text))
        return sorted(found, key=lambda s: -s.changed)

    def explain(self) -> str:
        """Which ranks wait, in what, and for whom."""
        rows = {rank: self.read(rank) for rank in range(self.ranks)}
        lines = [_stand(rank, lanes) for rank, lanes in rows.items()]
        counts = {(rank, s.lane): s.entered for rank, lanes in rows.items() for s in lanes}
        stuck = {s.lane: s for lanes in rows.values() for s in lanes if s.inside and s.members}
        for lane, one in stuck.items():
            ahead = max(counts.get((r, lane), 0) for r in one.members)
            late = [str(r) for r in one.members if counts.get((r, lane), 0) < ahead]
            if late:
                whole = len(one.members) == self.ranks
                who = "The others" if whole else f"The others of ranks {', '.join(map(str, one.members))}"
                lines.append(f"{who} wait for rank {', '.join(late)} to enter collective #{ahead}.")
        return "\n".join(lines)


def _packed(lane: str, members: Sequence[int] | str | None, text: str) -> bytes:
    """At most what fits in a slot: the text gives way first, then the list of members."""
    space = _SLOT - _HEAD.size
    for part, who in ((text, members), (text[:80], members), (text[:80], None)):
        body = json.dumps([lane, who if who is None or who == "all" else list(who), part]).encode()
        if len(body) <= space:
            return body
    return json.dumps([lane[:40], None, text[:40]]).encode()


def _stand(rank: int, lanes: list[Status]) -> str:
    if not lanes:
        return f"rank {rank} has not entered any collective"
    waiting = [s for s in lanes if s.inside]
    return "\n".join(s.sentence() for s in waiting or lanes[:1])

