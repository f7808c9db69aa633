"""A wire in one process with two buffers: while one is in flight it holds nothing of use, and touching it is noted.
All ranks are played in turn, call by call; a sum is made when it is waited for.

Torch is imported where it is used: looking at a hint must not load it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.lab.offered import offers

if TYPE_CHECKING:
    from torch import Tensor


@offers("wait", "is_completed")
class FlyingWork:
    """The handle of one launch. The sum over ranks is in the buffer once it is waited for, not before."""

    def __init__(self, wire: FlyingWire, number: int, buffer: int, sent: Tensor) -> None:
        self._wire, self.number, self.buffer, self.sent = wire, number, buffer, sent
        self.waited_in: int | None = None
        self._asked = False

    def wait(self, timeout: object = None) -> bool:
        """On ranks this blocks until the buffer has arrived."""
        if self.waited_in is None:
            self.waited_in = self._wire.call
            self._wire.land(self)
        return True

    def is_completed(self) -> bool:
        """Not yet, when it is first asked. Asking in a loop is waiting too, so it is noted as that."""
        if self.waited_in is None and not self._asked:
            self._asked = True
            return False
        return self.wait()


class Buffers(list):
    """The wire reads the memory of its buffers, so their contents change and they do not."""

    def __setitem__(self, which: object, value: object) -> None:
        if value is not self[which]:  # `buffers[b] += gradient` puts back what it took
            raise TypeError("a buffer cannot be replaced: the wire knows its memory. Change what is in it, as in "
                            "buffers[b].copy_(gradient)")


@offers("ranks", "buffers", "launch")
class FlyingWire:
    """`buffers[0]` and `buffers[1]`, and `launch(b)`, which starts the sum of one of them over all `ranks` of `peers`.

    The check sets `call` to the micro-step that is being told, or to the number of micro-steps in `finish`.
    """

    def __init__(self, peers: list[FlyingWire], ranks: int, elements: int) -> None:
        import torch

        self.ranks, self.call, self._peers = ranks, 0, peers
        peers.append(self)
        self.buffers = Buffers([torch.zeros(elements), torch.zeros(elements)])
        self._flying: list[tuple[FlyingWork, int] | None] = [None, None]
        self.begin(0)

    def begin(self, micro_steps: int) -> None:
        """A window."""
        self._micro_steps = micro_steps
        self.works: list[FlyingWork] = []
        self.added_in_flight: list[int] = []
        self.overwritten: list[int] = []

    def launch(self, buffer: int) -> FlyingWork:
        """From here to the wait() the buffer belongs to the wire. Raises `ValueError` for what is no buffer, and when
        more is launched than there are micro-steps."""
        if buffer not in (0, 1):
            raise ValueError(f"launch takes the number of a buffer, 0 or 1, not {buffer!r}")
        if len(self.works) == self._micro_steps:
            raise ValueError("launch was called more often than there are micro-steps; the other ranks expect no more")
        flat = self.buffers[buffer]
        self._look(buffer)
        work = FlyingWork(self, len(self.works), buffer, flat.clone())
        flat.fill_(float("nan"))
        self._flying[buffer] = work, flat._version
        self.works.append(work)
        return work

    def land(self, work: FlyingWork) -> None:
        flight = self._flying[work.buffer]
        if flight is not None and flight[0] is work:
            self._look(work.buffer)
            self._flying[work.buffer] = None
            self.buffers[work.buffer].copy_(sum(p.works[work.number].sent for p in self._peers
                                                if work.number < len(p.works)))

    def _look(self, buffer: int) -> None:
        """Was the buffer touched since its launch, and how? What is added to NaN stays NaN."""
        flight, flat = self._flying[buffer], self.buffers[buffer]
        if flight is None or flat._version == flight[1]:
            return
        (self.added_in_flight if bool(flat.isnan().any()) else self.overwritten).append(flight[0].number)
