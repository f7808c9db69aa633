"""The wire of exercise 12.2 in one process: reduce-scatters that are on their way until they are waited for.

All ranks are played in turn, call by call; a sum is made when it is waited for. What is handed over belongs to the wire
until then, and the wire keeps nothing of it afterwards. Torch is imported where it is used: looking at a hint must not
load it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class ScatterWork:
    """The handle of one reduce-scatter. This rank's part of the sum is in `part` once it is waited for."""

    def __init__(self, wire: ScatterWire, number: int, part: Tensor, whole: Tensor) -> None:
        self._wire, self.number, self.elements = wire, number, whole.numel()
        self._part, self._whole, self.sent = part, whole, whole.detach().clone()
        part.fill_(float("nan"))  # it may lie in `whole`
        self._version = whole._version
        self.launched_in, self.waited_in = wire.call, -1
        self.changed = False

    def wait(self, timeout: object = None) -> bool:
        """On ranks this blocks until the part has arrived."""
        if self.waited_in < 0:
            self.waited_in = self._wire.call
            self.changed = self._whole._version != self._version
            self._part.copy_(self._wire.sum_of(self.number))
            self._part = self._whole = None  # type: ignore[assignment]
        return True

    def is_completed(self) -> bool:
        """Asking in a loop is waiting too, so it is noted as that."""
        return self.wait()


class ScatterWire:
    """`rank`, `ranks` and `reduce_scatter(part, whole)`. `call` counts what the check has told this rank; `works` are
    those of the window."""

    def __init__(self, peers: list[ScatterWire], rank: int, ranks: int) -> None:
        self.rank, self.ranks, self._peers = rank, ranks, peers
        peers.append(self)
        self.call, self.works, self.misfit = 0, [], ""

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> ScatterWork:
        """Start the sum of `whole` over the ranks, of which part number `rank` of n equal ones goes into `part`.
        Returns at once. Raises `ValueError` unless `whole` is n times as long as `part`."""
        import torch

        for name, tensor in (("part", part), ("whole", whole)):
            if not isinstance(tensor, torch.Tensor) or tensor.dim() != 1:
                raise TypeError(f"reduce_scatter(part, whole) takes two 1-D tensors; {name} is none")
        if whole.numel() != self.ranks * part.numel():
            self.misfit = (f"whole has {whole.numel()} elements and part {part.numel()}; on {self.ranks} ranks whole "
                           f"has to be {self.ranks} times as long")
            raise ValueError(self.misfit)
        if not whole.is_contiguous():
            raise ValueError("whole is not contiguous; pass whole.contiguous()")
        work = ScatterWork(self, len(self.works), part, whole)
        self.works.append(work)
        return work

    def sum_of(self, number: int) -> Tensor:
        sent = [p.works[number].sent for p in self._peers if number < len(p.works)]
        if len({one.numel() for one in sent}) > 1:
            raise ValueError(f"reduce_scatter number {number + 1} of this window has another length on another rank")
        return sum(sent).chunk(self.ranks)[self.rank] if sent[0].numel() else sent[0]
