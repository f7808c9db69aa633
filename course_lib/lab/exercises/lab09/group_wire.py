"""The wire of exercise 9.2 in one process: groups of ranks with three blocking collectives, for ranks that `replay`
plays. Torch is imported where it is used: looking at a hint must not load it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from course_lib.lab.exercises.lab09.replay import Blocked
from course_lib.lab.offered import offers

if TYPE_CHECKING:
    from torch import Tensor

Members = tuple[int, ...]
SHARE = {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 2}
"""What a ring of n ranks sends for each, as a multiple of (n−1)/n of the tensor."""


class Call(NamedTuple):
    """A collective that a rank called."""

    op: str
    members: Members
    numel: int
    empty: bool
    """Whether a part of the tensor holds nothing of use."""


class Calls:
    """All collectives of all groups: by group and number, what each member gave."""

    def __init__(self) -> None:
        self.given: defaultdict[tuple[Members, int], dict[int, tuple[str, Tensor]]] = defaultdict(dict)

    def known(self) -> int:
        return sum(map(len, self.given.values()))


@offers("rank", "ranks", "group")
class GroupWire:
    """What one rank sees: `rank`, `ranks`, and `group(members)`. `log` holds its collectives."""

    def __init__(self, calls: Calls, rank: int, ranks: int) -> None:
        self.calls, self.rank, self.ranks = calls, rank, ranks
        self.log: list[Call] = []
        self._done: Counter[Members] = Counter()

    def group(self, members: Iterable[int]) -> Group:
        """The group of these ranks, of which this one has to be a member."""
        chosen = tuple(sorted(set(members)))
        if self.rank not in chosen or not set(chosen) <= set(range(self.ranks)):
            raise ValueError(f"rank {self.rank} asked for the group {list(chosen)}; a group is made of ranks from 0 to "
                             f"{self.ranks - 1}, and whoever asks is in it")
        return Group(self, chosen)

    def exchange(self, op: str, members: Members, flat: Tensor) -> list[Tensor]:
        """What every member gave to this collective, in their order."""
        import torch

        if not isinstance(flat, torch.Tensor) or flat.dim() > 1 or not (flat.dim() or op == "all_reduce"):
            raise TypeError(f"{op} takes a 1-D tensor")
        number = self._done[members]
        self._done[members] += 1
        self.log.append(Call(op, members, flat.numel(), bool(flat.isnan().any())))
        given = self.calls.given[members, number]
        given.setdefault(self.rank, (op, flat.detach().clone()))
        if absent := [r for r in members if r not in given]:
            raise Blocked(f"rank {self.rank} waits in {op} of the group {list(members)} for rank {absent[0]}")
        for other, (theirs, tensor) in given.items():
            if theirs != op or tensor.numel() != flat.numel():
                raise ValueError(f"rank {self.rank} calls {op} with {flat.numel()} numbers and rank {other} calls "
                                 f"{theirs} with {tensor.numel()}, in one group at one time")
        return [given[r][1] for r in members]


@offers("rank", "ranks", "reduce_scatter", "all_reduce", "all_gather")
class Group:
    """Some ranks and their collectives, all in place. `rank` is this rank's place among the `ranks` of the group."""

    def __init__(self, wire: GroupWire, members: Members) -> None:
        self._wire, self._members = wire, members
        self.rank, self.ranks = members.index(wire.rank), len(members)

    def reduce_scatter(self, flat: Tensor) -> None:
        """Sum over the group. Segment `rank` of `flat.tensor_split(ranks)` holds it; the others hold nothing of use."""
        given = self._wire.exchange("reduce_scatter", self._members, flat)
        mine = sum(t.tensor_split(self.ranks)[self.rank] for t in given)
        flat.fill_(float("nan"))
        flat.tensor_split(self.ranks)[self.rank].copy_(mine)

    def all_reduce(self, flat: Tensor) -> None:
        """Sum over the group, on every member."""
        flat.copy_(sum(self._wire.exchange("all_reduce", self._members, flat)))

    def all_gather(self, flat: Tensor) -> None:
        """Every member's own segment of `flat.tensor_split(ranks)` to all."""
        given = self._wire.exchange("all_gather", self._members, flat)
        for place, part in enumerate(flat.tensor_split(self.ranks)):
            part.copy_(given[place].tensor_split(self.ranks)[place])


def sent_between(log: Sequence[Call], node_of: Sequence[int]) -> float:
    """Elements that a rank sent in groups whose members are on several nodes, by rings."""
    return sum(SHARE[c.op] * (len(c.members) - 1) / len(c.members) * c.numel for c in log
               if len({node_of[r] for r in c.members}) > 1)  # fmt: skip
