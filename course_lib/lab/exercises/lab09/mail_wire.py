"""The wire of exercise 9.1 in one process: sends and receives between ranks that `replay` plays.

A send ends when its receiver has a receive for it, as a large message's does on real wires. A tensor that is to be
received into holds nothing of use until the `wait()`. Torch is imported where it is used: looking at a hint must not
load it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from course_lib.lab.exercises.lab09.replay import Blocked
from course_lib.lab.offered import offers

if TYPE_CHECKING:
    from torch import Tensor

Way = tuple[int, int]
"""From one rank to another. Messages of a way arrive in the order in which they were sent."""


class Post:
    """All messages and receives of all ranks."""

    def __init__(self) -> None:
        self.sent: defaultdict[Way, list[Tensor]] = defaultdict(list)
        self.received: Counter[Way] = Counter()

    def known(self) -> int:
        return sum(map(len, self.sent.values())) + sum(self.received.values())

    def missed(self) -> bool:
        """Whether something was sent in vain, and something else waited for in vain."""
        left = [len(self.sent[way]) - self.received[way] for way in {*self.sent, *self.received}]
        return min(left, default=0) < 0 < max(left, default=0)

    def elements_sent(self, rank: int) -> int:
        return sum(m.numel() for (source, _), messages in self.sent.items() for m in messages if source == rank)


@offers("wait")
class Handle:
    """A message on its way."""

    def __init__(self, wire: MailWire, way: Way, number: int, tensor: Tensor, sends: bool) -> None:
        self._wire, self._way, self._number, self.tensor, self._sends = wire, way, number, tensor, sends
        self.waited = False

    def wait(self, timeout: object = None) -> bool:
        """Block until a send may be overwritten, or until what was received is there."""
        post, (source, to) = self._wire.post, self._way
        if self.waited:
            return True
        if self._sends:
            if post.received[self._way] <= self._number:
                raise Blocked(f"rank {source} waits for its send to rank {to}, which does not receive")
            message = post.sent[self._way][self._number]
            if _bits(self.tensor) != _bits(message):
                self._wire.changed.append(to)
        else:
            if len(post.sent[self._way]) <= self._number:
                raise Blocked(f"rank {to} waits for a message from rank {source}, which sends none")
            message = post.sent[self._way][self._number]
            if message.numel() != self.tensor.numel():
                raise ValueError(f"rank {source} sent {message.numel()} numbers, and rank {to} receives into "
                                 f"{self.tensor.numel()}")
            self.tensor.copy_(message.view_as(self.tensor))
        self.waited = True
        return True


@offers("rank", "ranks", "send", "recv")
class MailWire:
    """What one rank sees: `rank`, `ranks`, `send(tensor, to)` and `recv(tensor, source)`, which return at once."""

    def __init__(self, post: Post, rank: int, ranks: int) -> None:
        self.post, self.rank, self.ranks = post, rank, ranks
        self.handles: list[Handle] = []
        self.changed: list[int] = []
        """To whom a message was sent whose tensor was changed before its `wait()`."""
        self._done: Counter[tuple[Way, bool]] = Counter()

    def send(self, tensor: Tensor, to: int) -> Handle:
        """Start sending. The tensor belongs to the wire until the handle's `wait()`."""
        self._refuse(tensor, to, "send")
        way = (self.rank, to)
        number = self._next(way, True)
        if number == len(self.post.sent[way]):
            self.post.sent[way].append(tensor.detach().clone())
        return self._handle(way, number, tensor, True)

    def recv(self, tensor: Tensor, source: int) -> Handle:
        """Start receiving into a tensor. What was sent is in it after the handle's `wait()`, not before."""
        self._refuse(tensor, source, "recv")
        way = (source, self.rank)
        number = self._next(way, False)
        self.post.received[way] = max(self.post.received[way], number + 1)
        tensor.fill_(float("nan"))
        return self._handle(way, number, tensor, False)

    def _next(self, way: Way, sends: bool) -> int:
        number = self._done[way, sends]
        self._done[way, sends] += 1
        return number

    def _handle(self, way: Way, number: int, tensor: Tensor, sends: bool) -> Handle:
        self.handles.append(Handle(self, way, number, tensor, sends))
        return self.handles[-1]

    def _refuse(self, tensor: Tensor, other: int, what: str) -> None:
        import torch

        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{what} takes a tensor and a rank, not a {type(tensor).__name__}")
        if other not in range(self.ranks) or other == self.rank:
            raise ValueError(f"rank {self.rank} called {what} with rank {other!r}; the other ranks are "
                             f"{[r for r in range(self.ranks) if r != self.rank]}")


def _bits(tensor: Tensor) -> bytes:
    """Its memory: NaN compares as what it is, and this takes a fraction of the time of `torch.equal`."""
    return tensor.detach().numpy().tobytes()
