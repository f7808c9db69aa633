"""A shared page on which every rank writes what its wire is doing, so that a stuck run can be explained."""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass

_SLOT = 256
_HEAD = struct.Struct("<qqdH")  # entered, finished, time of the last change, length of the text


@dataclass(frozen=True)
class Status:
    """`entered` and `finished` count collectives; `text` describes the one entered last."""

    rank: int
    entered: int
    finished: int
    since_s: float
    text: str

    def sentence(self) -> str:
        if not self.entered:
            return f"rank {self.rank} has not entered any collective"
        state = "is still inside" if self.entered > self.finished else "has finished"
        return f"rank {self.rank} {state} collective #{self.entered} ({self.text}) for {self.since_s:.1f} s"


class Board:
    """One slot a rank in anonymous shared memory; create before forking the ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._page = mmap.mmap(-1, max(1, ranks) * _SLOT)

    def write(self, rank: int, entered: int, finished: int, text: str) -> None:
        raw = text.encode()[: _SLOT - _HEAD.size]
        head = _HEAD.pack(entered, finished, time.monotonic(), len(raw))
        at = rank * _SLOT
        self._page[at: at + _HEAD.size + len(raw)] = head + raw

    def read(self, rank: int) -> Status:
        at = rank * _SLOT
        entered, finished, changed, size = _HEAD.unpack(self._page[at: at + _HEAD.size])
        text = self._page[at + _HEAD.size: at + _HEAD.size + size].decode(errors="replace")
        return Status(rank, entered, finished, time.monotonic() - changed if changed else 0.0, text)

    def explain(self) -> str:
        """Which ranks wait, in what, and for whom."""
        rows = [self.read(r) for r in range(self.ranks)]
        ahead = max(s.entered for s in rows)
        lines = [s.sentence() for s in rows]
        late = [str(s.rank) for s in rows if s.entered < ahead]
        if late:
            lines.append(f"The others wait for rank {', '.join(late)} to enter collective #{ahead}.")
        return "\n".join(lines)
