"""All ranks of exercise 11.3 with a clock: a gather takes a + b·numbers on a wire that carries one at a time, a
multiplication its rows times a constant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from course_lib.lab.exercises.lab11.meeting import Meeting, PlayedRank
from course_lib.lab.offered import offers
from course_lib.lab.workbench.crossing import refuse_no_tensor

if TYPE_CHECKING:
    from torch import Tensor


@offers("start_gather", "rank", "ranks")
class ClockedWire(PlayedRank):
    """What one rank sees: `rank`, `ranks` and `start_gather`. `now` is its clock, in seconds; `events` is what it did
    in order: G, W, M for a gather started, a wait, a multiplication."""

    def __init__(self, meeting: Meeting, rank: int, case: Case) -> None:
        super().__init__(meeting, rank, case.ranks)
        self.case, self.now, self.free, self.events = case, 0.0, 0.0, ""
        self.pieces: list[int] = []
        self.multiplied = 0

    def start_gather(self, part: Tensor) -> GatherHandle:
        """Start an all-gather and return at once."""
        refuse_no_tensor(part, "start_gather")
        if part.dim() != 2:
            raise ValueError(f"start_gather takes rows, (rows, width), not a tensor of {tuple(part.shape)}")
        self.events += "G"
        self.pieces.append(len(part))
        self.free = max(self.now, self.free) + self.case.travel(len(part))
        return GatherHandle(self, self.start("all_gather", "direct", part), self.free)

    def multiply(self, rows: Tensor) -> Tensor:
        """The matmul, and its time."""
        refuse_no_tensor(rows, "multiply")
        self.events += "M"
        self.multiplied += rows[..., 0].numel()
        self.now += self.case.row_s * rows[..., 0].numel()
        self.kept.append(rows @ self.case.weight.t())
        return self.kept[-1]


@offers("wait")
class GatherHandle:
    """An all-gather on its way."""

    def __init__(self, wire: ClockedWire, result: Callable[[], list[Tensor]], arrives: float) -> None:
        self._wire, self._result, self._arrives = wire, result, arrives

    def wait(self, timeout: object = None) -> Tensor:
        """Block until it is there: the parts of all ranks, (ranks, rows, width)."""
        import torch

        self._wire.kept.append(torch.stack(self._result()))
        self._wire.events += "W"
        self._wire.now = max(self._wire.now, self._arrives)
        return self._wire.kept[-1]


@dataclass
class Case:
    """One operator: what was given, what it costs, and what came of it on each rank."""

    xs: list[Tensor]
    weight: Tensor
    chunks: int
    a_s: float
    number_s: float
    row_s: float
    outputs: dict[int, Any] = field(default_factory=dict)
    wires: dict[int, ClockedWire] = field(default_factory=dict)
    waits: dict[int, str] = field(default_factory=dict)
    broke: str = ""

    @property
    def ranks(self) -> int:
        return len(self.xs)

    @property
    def rows(self) -> int:
        return len(self.xs[0])

    def travel(self, rows: int) -> float:
        """Seconds of one gather."""
        return self.a_s + self.number_s * rows * self.ranks * self.xs[0].shape[1]

    def ended(self) -> bool:
        return not self.waits and not self.broke

    def wanted(self) -> Tensor:
        import torch

        return torch.cat(self.xs) @ self.weight.t()

    def right(self) -> bool:
        return self.ended() and all(close(self.outputs[r], self.wanted()) for r in range(self.ranks))

    def cut(self) -> bool:
        """As many chunks as asked for, or as few as torch.chunk makes of them; each row once."""
        pieces = self.wires[0].pieces
        return (sum(pieces) == self.rows and min(pieces) > 0 and max(pieces) <= -(-self.rows // self.chunks)
                and len(pieces) <= self.chunks)

    def multiplied(self) -> int:
        """How many rows rank 0 multiplied beyond those of all ranks; below 0 those that it never did."""
        return self.wires[0].multiplied - self.ranks * self.rows

    def one_ahead_s(self) -> float:
        """What its own pieces take when one gather is always ahead."""
        pieces, now = self.wires[0].pieces, 0.0
        here = self.travel(pieces[0]) if pieces else 0.0
        for i, rows in enumerate(pieces):
            start = max(now, here)
            if i + 1 < len(pieces):
                here = max(start if i else 0.0, here) + self.travel(pieces[i + 1])
            now = start + self.row_s * rows * self.ranks
        return now

    def overlaps(self) -> bool:
        return self.ended() and self.multiplied() >= 0 and self.wires[0].now <= self.one_ahead_s() * (1 + 1e-9)

    def lacks_the_last(self) -> bool:
        """Whether the result is that of all chunks but the last."""
        import torch

        pieces = self.wires[0].pieces
        kept = sum(pieces) if sum(pieces) < self.rows else sum(pieces[:-1])
        return all(close(self.outputs[r], torch.cat([x[:kept] for x in self.xs]) @ self.weight.t())
                   for r in range(self.ranks))

    def __str__(self) -> str:
        said = f"{self.ranks} ranks of {self.rows} rows, {self.chunks} chunks"
        if not self.ended():
            return f"{said}: {self.broke or '; '.join(list(self.waits.values())[:2])}"
        wire, got = self.wires[0], self.outputs[0]
        pieces = f"chunks of {wire.pieces} rows" if wire.pieces else "nothing was gathered"
        shape = tuple(got.shape) if hasattr(got, "shape") else got
        order = " ".join(wire.events.replace("G", "start ").replace("W", "wait ").replace("M", "multiply ").split())
        late = f"; {wire.now * 1e3:.0f} ms, and {self.one_ahead_s() * 1e3:.0f} with one gather ahead"
        late += f"; {wire.multiplied} rows multiplied, of {self.ranks * self.rows}" if self.multiplied() else ""
        return f"{said}: {pieces}; {order or 'no calls'}; a result of {shape}" + (late if wire.pieces else "")


def close(found: object, wanted: Tensor) -> bool:
    import torch

    return isinstance(found, torch.Tensor) and found.shape == wanted.shape and torch.allclose(found.double(), wanted)
