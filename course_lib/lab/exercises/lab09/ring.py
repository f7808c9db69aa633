"""Exercise 9.1: the ring all-reduce from sends and receives.

The learner writes `ring_all_reduce(flat, wire)`; every rank calls it with its own 1-D tensor of the same size:

- `wire.rank` and `wire.ranks`; `wire.send(tensor, to)` and `wire.recv(tensor, source)` start a message, return a handle
  at once, and `handle.wait()` blocks. A send ends when its receiver has begun to receive.
- Afterwards `flat` holds the sum over ranks, in place, on every rank; nothing is returned.
- The tensor is cut into as many segments as there are ranks, `flat.tensor_split(wire.ranks)`. In n−1 hops each
  segment travels around and is summed up; in n−1 more the sums travel around. Each rank sends 2(n−1)/n of the tensor.

The check plays all ranks. Who contributed how often to which segment is read off a tensor in which every rank has a
digit of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from course_lib.lab.exercises.lab09.mail_wire import MailWire, Post
from course_lib.lab.exercises.lab09.replay import play
from course_lib.lab.guard import Broke, call
from course_lib.lab.model import Row, Verdict, exercise

if TYPE_CHECKING:
    from torch import Tensor

HINTS = (
    "Follow one segment. In hop k a rank sends one segment to its right neighbour and receives another from its left "
    "one. What it has just added to is what it sends in the next hop. Which segment is that, counted from its own "
    "number?",
    "First half: in hop k = 0 … n−2 rank r sends segment (r − k) % n and adds what it receives to segment "
    "(r − k − 1) % n. After it, segment (r + 1) % n is complete on rank r. Second half: in hop k it sends segment "
    "(r + 1 − k) % n and receives segment (r − k) % n in place. In each hop: post the receive, then send, then wait.",
    "parts = list(flat.tensor_split(n)). for k in range(n - 1): buffer = torch.empty_like(parts[(r - k - 1) % n]); "
    "coming = wire.recv(buffer, (r - 1) % n); going = wire.send(parts[(r - k) % n], (r + 1) % n); coming.wait(); "
    "going.wait(); parts[(r - k - 1) % n] += buffer. Then the same once more with parts[(r + 1 - k) % n] sent and "
    "parts[(r - k) % n] as the buffer, without adding.",
)

MISTAKES = {
    "deadlock": "All ranks wait for each other. A send ends when its receiver has begun to receive, and a receive ends "
    "when something was sent. If every rank waits for the one before it starts the other, nobody gets there. Start "
    "both, then wait for both.",
    "wrong_neighbour": "What is sent is not what is waited for: a rank sends to one neighbour, and that one waits for "
    "a message from another. Who sends to the right, (r + 1) % n, receives from the left, (r - 1) % n. With two ranks "
    "both are the same rank.",
    "not_in_place": "`flat` is unchanged. The sum has to be written into the tensor that was passed; a new tensor, or "
    "a returned one, is not looked at.",
    "forgets_to_wait": "A message was not waited for, or not before it was used. What you receive is there after the "
    "`wait()` of its handle, and what you send belongs to the wire until then: wait for each handle before you read or "
    "send that segment, and before you return.",
    "changes_in_flight": "You change a segment while it is being sent. Receive a summand into a tensor of its own, and "
    "add to a segment only when its send has been waited for.",
    "off_by_one": "Segments land in the wrong place: what a rank receives is another segment than the one it adds to "
    "or writes over. Your left neighbour sends *its* (r − k), which is (r − 1 − k) counted from you.",
    "overwrites": "Nothing is added up: what arrives in the first half replaces what the rank had. Receive it into a "
    "tensor of its own, and add that to the segment.",
    "counts_twice": "Some summands are counted more than once. In the second half a finished sum arrives: it replaces "
    "what is there, and is not added to it.",
    "stops_half_way": "Some sums are not complete on every rank. The first half leaves each rank one finished segment. "
    "The second half takes the finished ones around, beginning with the one that this rank finished: (r + 1) % n in "
    "the numbering of the text.",
    "takes_the_mean": "Your result is the mean. Here the sum is asked for: who calls it divides.",
    "drops_the_tail": "It works where the number of ranks divides the size, and not elsewhere. Segments may differ by "
    "one element and may be empty; `flat.tensor_split(n)` cuts them so.",
    "sends_too_much": "The sums are right, but a rank sends more than 2(n−1)/n of the tensor. What makes a ring cheap "
    "is that a hop carries one segment, not the whole tensor, and that each half has n−1 hops.",
}


class Case(NamedTuple):
    """One all-reduce: what was given, what each rank's tensor holds afterwards, and what the wire saw."""

    given: list[Tensor]
    found: list[Tensor]
    waits: dict[int, str]
    unwaited: bool
    changed: bool
    post: Post
    broke: str = ""

    @property
    def ranks(self) -> int:
        return len(self.given)

    @property
    def size(self) -> int:
        return self.given[0].numel()

    @property
    def sent(self) -> int:
        """Elements that a rank sent, the most of any."""
        return max(self.post.elements_sent(rank) for rank in range(self.ranks))

    def holds(self, value: Tensor) -> bool:
        import torch

        return not self.broke and not self.waits and all(torch.allclose(f, value, atol=1e-4) for f in self.found)

    def right(self) -> bool:
        return self.holds(sum(self.given))

    def cheap(self) -> bool:
        """At most a segment in each of 2(n−1) hops, the largest."""
        return self.sent <= 2 * (self.ranks - 1) * -(-self.size // self.ranks)

    def __str__(self) -> str:
        said = [f"{self.ranks} ranks, {self.size} numbers"]
        if self.broke:
            return f"{said[0]}: {self.broke}"
        said += list(self.waits.values())[:2]
        said += ["a handle was not waited for"] * self.unwaited + ["a segment was changed in flight"] * self.changed
        if not self.waits and not self.right():
            said.append(f"rank 0 has {_short(self.found[0])}, the sum is {_short(sum(self.given))}")
        if not self.cheap():
            said.append(f"a rank sent {self.sent} numbers")
        return "; ".join(said)


@exercise("9.1", title="the ring", minutes=12, needs="ring_all_reduce", hints=HINTS, mistakes=MISTAKES)
def reduce_around_the_ring(answer: Callable, draw: random.Random) -> Verdict:
    """Rows over the example and all-reduces of one to five ranks, of sizes that they divide and do not."""
    import torch

    example = _played(answer, [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([10.0, 20.0, 30.0, 40.0])])
    even = [_played(answer, _drawn(draw, n, n * draw.randint(1, 4))) for n in (1, 2, 3, 4)]
    sizes = [(n, n * draw.randint(1, 3) + draw.randint(1, n - 1)) for n in (2, 3, 5)] + [(4, 2)]
    uneven = [_played(answer, _drawn(draw, n, size), ragged=True) for n, size in sizes]
    cases = [example, *even, *uneven]
    rows = (
        Row("the example of the text", example.right(), "[11, 22, 33, 44] on both ranks", str(example)),
        _row("all ranks come to an end", "nobody waits for ever", cases, lambda c: not c.waits),
        _row("a segment in flight is left alone", "changed after its wait()", cases, lambda c: not c.changed),
        _row("everything is waited for", "a wait() for each handle", cases, lambda c: c.waits or not c.unwaited),
        _row("the sum, on every rank", "equal tensors", even, Case.right),
        _row("sizes that the ranks do not divide", "the sum, to the last element", uneven, Case.right),
        _row("each rank sends 2(n−1)/n of the tensor", "a segment a hop", [c for c in cases if not c.waits],
             Case.cheap),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(answer, cases, [example, *even]))


def _mistake(answer: Callable, cases: list[Case], even: list[Case]) -> str:
    """The mistake that explains what is seen; the plainest one first, sizes that divide before the others."""
    import torch

    several = [c for c in even if c.ranks > 1]
    if any(c.waits for c in several):
        return "wrong_neighbour" if all(c.post.missed() for c in several if c.waits) else "deadlock"
    if all(torch.equal(f, g) for c in several for f, g in zip(c.found, c.given)):
        return "not_in_place"
    if any(c.changed for c in several):
        return "changes_in_flight"
    # On two ranks a wrong segment may be the one that is being sent, and what is sent then is nothing of use either.
    unread = any(bool(f.isnan().any()) for c in several if c.ranks > 2 for f in c.found)
    if unread or any(c.unwaited for c in several):
        return "forgets_to_wait"
    if all(c.right() for c in even):
        return "drops_the_tail" if not all(c.right() for c in cases) else "sends_too_much"
    if all(c.holds(sum(c.given) / c.ranks) for c in several):
        return "takes_the_mean"
    counted = _counts(answer, 4)
    if any(count for segment, place, count in counted if segment != place):
        return "off_by_one"
    times = [_digits(count, 4) for segment, place, count in counted if segment == place]
    if all(sum(each) == 1 for each in times) and not _sums_travel(answer, 4):
        return "overwrites"
    if any(max(each) > 1 for each in times):
        return "counts_twice"
    return "stops_half_way" if any(min(each) == 0 for each in times) else ""


def _counts(answer: Callable, n: int) -> list[tuple[int, int, int]]:
    """(segment that was given, place where it is found, what is there) on every rank, one segment at a time. Rank q
    gives 8^q: how often it was counted is a digit of the sum."""
    import torch

    found = []
    for segment in range(n):
        given = [torch.zeros(n) for _ in range(n)]
        for q, flat in enumerate(given):
            flat[segment] = 8.0**q
        found += [(segment, place, int(value)) for flat in _played(answer, given).found
                  for place, value in enumerate(flat.tolist())]  # fmt: skip
    return found


def _sums_travel(answer: Callable, n: int) -> bool:
    """Whether a message ever holds what several ranks gave."""
    import torch

    post = _played(answer, [torch.full((n,), 8.0**q) for q in range(n)]).post
    return any(sum(_digits(int(value), n)) > 1 for messages in post.sent.values() for value in torch.cat(messages))


def _digits(value: int, n: int) -> list[int]:
    return [value // 8**q % 8 for q in range(n)]


def _played(answer: Callable, given: list[Tensor], ragged: bool = False) -> Case:
    """One all-reduce. In a `ragged` one an exception is part of what was seen."""
    post, n = Post(), len(given)
    wires: dict[int, MailWire] = {}
    flats: dict[int, Tensor] = {}

    def one(rank: int) -> None:
        wires[rank], flats[rank] = MailWire(post, rank, n), given[rank].clone()
        call(answer, flats[rank], wires[rank], shown=f"ring_all_reduce(flat, wire) on rank {rank} of {n}")

    try:
        ended = play(n, one, post.known)
    except Broke as error:
        if not ragged:
            raise
        return Case(given, [flats.get(r, g) for r, g in enumerate(given)], {}, False, False, post, str(error))
    return Case(given, [flats[r] for r in range(n)], ended.waits,
                any(not h.waited for wire in wires.values() for h in wire.handles),
                any(wire.changed for wire in wires.values()), post)  # fmt: skip


def _drawn(draw: random.Random, ranks: int, size: int) -> list[Tensor]:
    import torch

    return [torch.tensor([float(draw.randint(1, 99)) for _ in range(size)]) for _ in range(ranks)]


def _short(flat: Tensor) -> str:
    return "[" + ", ".join(f"{value:g}" for value in flat[:6].tolist()) + (", …]" if flat.numel() > 6 else "]")


def _row(name: str, expected: str, cases: list[Case], holds: Callable[[Case], bool]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: (c.ranks, c.size))
    seen = str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} all-reduces"
    return Row(name, not broken, expected, seen)
