"""Exercise 9.2: the hierarchical all-reduce.

The learner writes `two_level_all_reduce(flat, node_of, wire)`; every rank calls it with its own 1-D tensor:

- `node_of[r]` is the node of rank r; every node has as many ranks. Ranks of a node need not follow each other.
- `wire.rank`, `wire.ranks`; `wire.group(members)` gives the group of some ranks, with `rank`, `ranks`,
  `reduce_scatter(flat)`, `all_reduce(flat)` and `all_gather(flat)`, which block and work in place. Segments are those
  of `flat.tensor_split(group.ranks)`.
- Afterwards `flat` holds the sum over all ranks, and between the nodes a rank has sent no more than
  2(m−1)/m · S/g, with m nodes of g ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from course_lib.lab.exercises.lab09.group_wire import Call, Calls, GroupWire, sent_between
from course_lib.lab.exercises.lab09.replay import play
from course_lib.lab.guard import Broke, call
from course_lib.lab.model import Row, Verdict, exercise

if TYPE_CHECKING:
    from torch import Tensor

HINTS = (
    "Three steps. Inside each node the ranks share the work: afterwards each holds the node's sum of one segment. Then "
    "each looks for the ranks that hold the same segment on the other nodes. What is left to do inside the node?",
    "The inner group: all ranks of my node. The inter group: from each node the rank that has my place in it, the i-th "
    "of its node for the i-th of mine. Steps: inner.reduce_scatter(flat); inter.all_reduce of *my segment* of flat; "
    "inner.all_gather(flat).",
    "mates = [r for r in range(wire.ranks) if node_of[r] == node_of[wire.rank]]; place = mates.index(wire.rank); peers "
    "= [[r for r in range(wire.ranks) if node_of[r] == node][place] for node in sorted(set(node_of))]; inner, inter = "
    "wire.group(mates), wire.group(peers); then the three steps, with flat.tensor_split(inner.ranks)[inner.rank].",
)

MISTAKES = {
    "not_in_place": "`flat` is unchanged. The sum has to be written into the tensor that was passed.",
    "hangs": "A rank waits in a group whose other members never call. Every rank needs two groups: all ranks of its "
    "node, and one rank from each node with the same place in it.",
    "stays_inside": "Nothing goes between the nodes: each node has a sum of its own, and no two are alike.",
    "twice_inside": "You reduce twice inside the node. After the first time every rank's part is already a sum of the "
    "node; the second time adds these sums once more. The last step only has to *bring together* what is finished: "
    "all_gather.",
    "whole_between": "The whole tensor goes between the nodes. After the reduce-scatter each rank has to send its own "
    "segment only, 1/g of it; the other ranks of its node send the rest.",
    "wrong_segment": "What goes between the nodes is not the segment that this rank holds. After the reduce-scatter it "
    "is the one with this rank's place *inside its node*; the others hold nothing of use.",
    "no_gather": "Each rank has the sum of its own segment only. At the end the ranks of a node have to bring their "
    "segments together.",
    "takes_the_mean": "Your result is the mean. Here the sum is asked for: who calls it divides.",
    "drops_the_tail": "It works where the ranks of a node divide the size, and not elsewhere. Segments may differ by "
    "one element: `flat.tensor_split(g)` cuts them as the collectives do.",
    "assumes_blocks": "It works where the ranks of a node follow each other, 0 0 1 1, and not elsewhere. Whether they "
    "do is up to the launcher: look each rank up in `node_of`.",
}


class Case(NamedTuple):
    """One all-reduce: who is where, what was given and found, and the collectives of each rank."""

    node_of: tuple[int, ...]
    given: list[Tensor]
    found: list[Tensor]
    waits: dict[int, str]
    logs: list[list[Call]]
    broke: str = ""

    @property
    def nodes(self) -> int:
        return len(set(self.node_of))

    @property
    def per_node(self) -> int:
        return len(self.node_of) // self.nodes

    @property
    def size(self) -> int:
        return self.given[0].numel()

    def between(self) -> float:
        """Elements that a rank sent between the nodes, the most of any."""
        return max(sent_between(log, self.node_of) for log in self.logs)

    def cheap(self) -> bool:
        """A rank's own segment is the most that goes around between the nodes; segments differ by one element."""
        return self.between() <= 2 * (self.nodes - 1) / self.nodes * -(-self.size // self.per_node) + 1e-6

    def crossing(self, rank: int = 0) -> list[Call]:
        return [c for c in self.logs[rank] if len({self.node_of[r] for r in c.members}) > 1]

    def inside(self) -> list[Call]:
        return [c for c in self.logs[0] if len({self.node_of[r] for r in c.members}) == 1]

    def holds(self, value: Tensor) -> bool:
        import torch

        return not self.broke and not self.waits and all(torch.allclose(f, value, atol=1e-3) for f in self.found)

    def right(self) -> bool:
        return self.holds(sum(self.given))

    def __str__(self) -> str:
        said = f"nodes {list(self.node_of)}, {self.size} numbers"
        if self.broke or self.waits:
            return f"{said}: {self.broke or '; '.join(list(self.waits.values())[:2])}"
        ours = ", ".join(f"{c.op} of {c.numel} in {list(c.members)}" for c in self.logs[0]) or "no collective"
        value = f"{self.found[0][0]:g}, the sum begins with {sum(self.given)[0]:g}"
        return f"{said}; rank 0: {ours}; its result begins with {value}; between nodes a rank sent {self.between():g}"


@exercise("9.2", title="two levels", minutes=8, needs="two_level_all_reduce", hints=HINTS, mistakes=MISTAKES)
def reduce_in_two_levels(answer: Callable, draw: random.Random) -> Verdict:
    """Rows over clusters of one to three nodes whose ranks follow each other, are dealt in turn, or lie anyhow."""
    shapes = [(2, 2), (2, 3), (3, 2), (1, 3), (3, 1)]
    blocks = [_played(answer, [node for node in range(m) for _ in range(g)], draw) for m, g in shapes]
    uneven = [_played(answer, block.node_of, draw, uneven=1) for block in blocks[:3]]
    turns = [_played(answer, [r % m for r in range(m * g)], draw) for m, g in shapes[:3]]
    anyhow = [_played(answer, draw.sample(turn.node_of, len(turn.node_of)), draw, uneven=1) for turn in turns]
    if blocks[0].broke:
        raise Broke(blocks[0].broke)
    cases = [*blocks, *uneven, *turns, *anyhow]
    rows = (
        _row("all ranks come to an end", "nobody waits for ever", cases, lambda c: not c.waits),
        _row("the sum, on every rank", "nodes of ranks that follow each other", blocks, Case.right),
        _row("a size that the ranks do not divide", "the sum, to the last element", uneven, Case.right),
        _row("ranks that lie otherwise", "the same, whoever is where", [*turns, *anyhow], Case.right),
        _row("a part of it goes between the nodes", "2(m−1)/m · S/g a rank at most", cases,
             Case.cheap),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(blocks, uneven, turns))


def _mistake(blocks: list[Case], uneven: list[Case], turns: list[Case]) -> str:
    """The mistake that explains what is seen; the plainest one first, and blocks before other sizes and placements."""
    import torch

    several = [c for c in blocks if c.nodes > 1 and c.per_node > 1 and not c.broke]
    if any(c.waits for c in several):
        return "hangs"
    if all(torch.equal(f, g) for c in several for f, g in zip(c.found, c.given)):
        return "not_in_place"
    if not any(c.crossing() for c in several):
        return "stays_inside"
    if any(call.numel == c.size for c in several for call in c.crossing()):
        return "whole_between"
    if all(c.right() for c in several):
        if not all(c.cheap() for c in several):
            return ""
        if not all(c.right() for c in uneven):
            return "drops_the_tail"
        return "" if all(c.right() and c.cheap() for c in turns) else "assumes_blocks"
    if any(sum(call.op != "all_gather" for call in c.inside()) > 1 for c in several):
        return "twice_inside"
    if all(c.holds(sum(c.given) / len(c.given)) for c in several):
        return "takes_the_mean"
    if any(call.empty for c in several for rank in range(len(c.node_of)) for call in c.crossing(rank)):
        return "wrong_segment"
    return "no_gather" if not any(call.op == "all_gather" for c in several for call in c.inside()) else ""


def _played(answer: Callable, node_of: Sequence[int], draw: random.Random, uneven: int = 0) -> Case:
    """One all-reduce, of a size that the ranks divide but for `uneven` elements. An exception is part of what was
    seen."""
    import torch

    n, size = len(node_of), len(node_of) * draw.randint(1, 3) + uneven
    given = [torch.tensor([float(draw.randint(1, 99)) for _ in range(size)]) for _ in range(n)]
    calls, wires, flats = Calls(), {}, {}

    def one(rank: int) -> None:
        wires[rank], flats[rank] = GroupWire(calls, rank, n), given[rank].clone()
        call(answer, flats[rank], list(node_of), wires[rank],
             shown=f"two_level_all_reduce(flat, {list(node_of)}, wire) on rank {rank}")

    try:
        waits, broke = play(n, one, calls.known).waits, ""
    except Broke as error:
        waits, broke = {}, str(error)
    found = [flats.get(r, given[r]) for r in range(n)]
    return Case(tuple(node_of), given, found, waits, [wires[r].log if r in wires else [] for r in range(n)], broke)


def _row(name: str, expected: str, cases: list[Case], holds: Callable[[Case], bool]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: (len(c.node_of), c.size))
    seen = str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} all-reduces"
    return Row(name, not broken, expected, seen)
