"""The collectives of all ranks in one process, for ranks that `replay` plays.

Torch is imported where it is used: looking at a hint must not load it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from course_lib.lab.exercises.lab09.replay import Blocked

if TYPE_CHECKING:
    from torch import Tensor

SHARE = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""What a ring of n ranks sends for each, as a multiple of (n−1)/n of the whole tensor."""


class Call(NamedTuple):
    """A collective that a rank called: in its `forward` or `backward` crossing, or by itself (`direct`)."""

    op: str
    when: str
    tensor: Tensor
    sent: float
    """Elements that a rank sends in a ring."""


class Meeting:
    """The collectives of all ranks by number: what each rank gave."""

    def __init__(self) -> None:
        self.given: defaultdict[int, dict[int, tuple[str, Tensor]]] = defaultdict(dict)

    def known(self) -> int:
        return sum(map(len, self.given.values()))


class PlayedRank:
    """One rank's collectives. `log` holds them in order.

    `kept` holds what was handed out. In a grader the code that is checked runs in another process, which knows a
    tensor of this one for as long as it lives here.
    """

    def __init__(self, meeting: Meeting, rank: int, ranks: int) -> None:
        self.meeting, self.rank, self.ranks = meeting, rank, ranks
        self.log: list[Call] = []
        self.kept: list[Tensor] = []

    def start(self, op: str, when: str, x: Tensor) -> Callable[[], list[Tensor]]:
        """Note this collective. What is returned gives the tensors of all ranks, in their order."""
        number = len(self.log)
        whole = x.numel() * (self.ranks if op == "all_gather" else 1)
        self.log.append(Call(op, when, x.detach().clone(), SHARE[op] * (self.ranks - 1) / self.ranks * whole))
        given = self.meeting.given[number]
        given.setdefault(self.rank, (op, x.detach().clone()))

        def result() -> list[Tensor]:
            if absent := [r for r in range(self.ranks) if r not in given]:
                raise Blocked(f"rank {self.rank} waits in its collective {number + 1}, {op}, for rank {absent[0]}")
            for other, (theirs, tensor) in given.items():
                if theirs != op or tensor.shape != x.shape:
                    raise ValueError(f"rank {self.rank} calls {op} with {tuple(x.shape)} and rank {other} calls "
                                     f"{theirs} with {tuple(tensor.shape)}, each as its collective {number + 1}")
            return [given[r][1] for r in range(self.ranks)]

        return result

    def collective(self, op: str, when: str, x: Tensor) -> Tensor:
        """The result of this collective on this rank. Dimension −2 is the sequence."""
        import torch

        if op == "reduce_scatter" and (x.dim() < 2 or x.shape[-2] % self.ranks):
            raise ValueError(f"reduce_scatter of {tuple(x.shape)} on {self.ranks} ranks: dimension −2 has to be a "
                             "multiple of the ranks")
        tensors = self.start(op, when, x)()
        if op == "all_gather":
            self.kept.append(torch.cat(tensors, dim=-2))
        else:
            total = sum(tensors)
            self.kept.append(total if op == "all_reduce" else total.chunk(self.ranks, dim=-2)[self.rank].clone())
        return self.kept[-1]
