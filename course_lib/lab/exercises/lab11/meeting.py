"""The wire of lab 11 in one process: collectives of all ranks, for ranks that `replay` plays.

Torch is imported where it is used: looking at a hint must not load it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
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


class PlayedWire:
    """What one rank sees: `rank`, `ranks`, `cross` and `all_reduce`. `log` holds its collectives."""

    def __init__(self, meeting: Meeting, rank: int, ranks: int) -> None:
        self.meeting, self.rank, self.ranks = meeting, rank, ranks
        self.log: list[Call] = []

    def cross(self, x: Tensor, forward: str | None = None, backward: str | None = None) -> Tensor:
        """The collective `forward` of x; on the way back, the collective `backward` of the gradient."""
        from course_lib.tensor.regions import cross

        for op in (forward, backward):
            refuse_unknown(op)
        refuse_no_tensor(x, "cross")
        return cross(x, partial(self._collective, op=forward, when="forward"),
                     partial(self._collective, op=backward, when="backward"))  # fmt: skip

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the ranks."""
        refuse_no_tensor(tensor, "all_reduce")
        tensor.copy_(self._collective(tensor.detach(), "all_reduce", "direct"))

    def exchange(self, op: str, when: str, x: Tensor) -> Callable[[], list[Tensor]]:
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

    def _collective(self, x: Tensor, op: str | None, when: str) -> Tensor:
        import torch

        if op is None:
            return x.view_as(x)
        if op == "reduce_scatter" and (x.dim() < 2 or x.shape[-2] % self.ranks):
            raise ValueError(f"reduce_scatter of {tuple(x.shape)} on {self.ranks} ranks: dimension −2 has to be a "
                             "multiple of the ranks")
        tensors = self.exchange(op, when, x)()
        if op == "all_gather":
            return torch.cat(tensors, dim=-2)
        total = sum(tensors)
        return total if op == "all_reduce" else total.chunk(self.ranks, dim=-2)[self.rank].clone()


def refuse_unknown(op: object) -> None:
    """Raises `ValueError` for what is no collective of a crossing."""
    if op is not None and op not in SHARE:
        raise ValueError(f"cross takes {', '.join(map(repr, SHARE))} or None, not {op!r}")


def refuse_no_tensor(x: object, name: str) -> None:
    """Raises `TypeError` for what is no tensor of floating point numbers."""
    import torch

    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} takes a tensor, not {'an integer tensor' if isinstance(x, torch.Tensor) else x!r}")
