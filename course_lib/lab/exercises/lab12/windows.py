"""Windows with the learner's `ScatterBuckets` on ranks played in one process, and what can be read off them.

Torch is imported where it is used: looking at a hint must not load it.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from course_lib.lab.exercises.lab12.scatter_wire import ScatterWire
from course_lib.lab.guard import Broke, call, on_its_side

if TYPE_CHECKING:
    from torch import Tensor

DIGIT = 8
"""Micro-step i's gradient is 8^i times the bucket's: how often it was counted is a digit of the result."""


@dataclass(frozen=True)
class Window:
    """One window on all ranks, whose backward fills the buckets in this `order`. `found[r][b]` is what rank r's finish
    gave for bucket b, `wanted` what it should be, `bases[b]` the bucket's gradient but for the micro-step's digit. The
    rest was noted by the wire."""

    number: int
    ranks: int
    N: int
    sizes: tuple[int, ...]
    bases: list[Tensor]
    found: list[list[Tensor]]
    order: tuple[int, ...]
    late: int = 0
    waited: int = 0
    changed: int = 0
    short: bool = False
    kept: int = 0
    misfit: str = ""

    @property
    def even(self) -> bool:
        return not any(size % self.ranks for size in self.sizes)

    def each(self, b: int) -> int:
        return -(-self.sizes[b] // self.ranks)

    def wanted(self, rank: int, b: int) -> Tensor:
        each = self.each(b)
        return self.bases[b][rank * each:(rank + 1) * each] * sum(DIGIT**i for i in range(self.N))

    def prompt(self) -> bool:
        return bool(self.misfit) or not self.late

    def right(self, without_padding: bool = False) -> bool:
        return not self.misfit and all(_near(self._cut(rank, b) if without_padding else part, self.wanted(rank, b))
                                       for rank, row in enumerate(self.found) for b, part in enumerate(row))

    def _cut(self, rank: int, b: int) -> Tensor:
        return self.found[rank][b][:self.wanted(rank, b).numel()]

    def shifted(self) -> bool:
        """Whether all parts together are the buckets with the padding in front, or what is left when its length is cut
        off behind."""
        import torch

        if self.misfit:
            return False
        for b, size in enumerate(self.sizes):
            each = self.each(b)
            whole = torch.cat([self.bases[b].new_zeros(each * self.ranks - size), self.bases[b]])
            whole = whole * sum(DIGIT**i for i in range(self.N))
            for rank, row in enumerate(self.found):
                part = whole[rank * each:(rank + 1) * each]
                if not any(_near(row[b], one) for one in (part, part[:self.wanted(rank, b).numel()])):
                    return False
        return True

    def by_place(self) -> bool:
        """Whether the parts stand in the order in which their buckets came, as far as they were cut alike."""
        for rank, row in enumerate(self.found):
            for part, b in zip(row, self.order):
                want = self.wanted(rank, b)
                both = min(part.numel(), want.numel())
                if not _near(part[:both], want[:both]):
                    return False
        return not self.misfit and self.order != tuple(sorted(self.order))

    def holds(self, factor: float) -> bool:
        """Whether every part is the wanted one times `factor`."""
        return not self.misfit and all(_near(part, self.wanted(rank, b) * factor)
                                       for rank, row in enumerate(self.found) for b, part in enumerate(row))

    @property
    def counts(self) -> list[int]:
        """How often each micro-step is in rank 0's first part; empty where it cannot be read off."""
        part, base = self.found[0][0], self.bases[0]
        if self.misfit or not part.numel() or bool(part.isnan().any()):
            return []
        value = round(float(part[0] / base[0]))
        return [value // DIGIT**i % DIGIT for i in range(self.N)]

    def unread(self) -> bool:
        return any(bool(part.isnan().any()) for row in self.found for part in row)

    def __str__(self) -> str:
        said = f"window {self.number + 1}: {self.ranks} ranks, {self.N} micro-steps, buckets of {list(self.sizes)}"
        if self.misfit:
            return f"{said}: {self.misfit}"
        for count, what in ((self.late, "not sent in their call"), (self.waited, "waited for in the call that sends"),
                            (self.changed, "changed in flight")):
            if count:
                said += f"; {what}: {count}"
        for rank, row in enumerate(self.found):
            for b, part in enumerate(row):
                if not _near(part, want := self.wanted(rank, b)):
                    return (f"{said}; rank {rank}, bucket {b}: {_short(part)}, and the mean of its part is "
                            f"{_short(want)}")
        return f"{said}; {self.kept} whole gradients still alive after end_of_backward" if self.kept else said


def windows(answer: type, ranks: int, N: int, sizes: Sequence[int], draw: random.Random) -> list[Window]:
    """Two windows. A misuse of the wire ends them."""
    import torch

    numbers = [draw.sample(range(3, 300), sum(sizes)) for _ in range(2)]
    bases = [[[float(next(values)) for _ in range(size)] for size in sizes] for values in map(iter, numbers)]
    order = tuple(draw.sample(range(len(sizes)), len(sizes)))
    order = order[::-1] if list(order) == sorted(order) else order  # never that of the result
    seen = on_its_side(told, answer, ranks, N, list(sizes), bases, order)
    out = []
    filled = [sizes[b] for b in order] * N
    for number, (given, (found, kept, works, misfit)) in enumerate(zip(bases, seen)):
        calls = [i * (len(sizes) + 1) + b for i in range(N) for b in range(len(sizes))]
        prompt = [launched for launched, *_ in works] == calls
        out.append(Window(
            number, ranks, N, tuple(sizes), [torch.tensor(base) for base in given],
            [[torch.tensor(part) for part in row] for row in found], order, kept=kept, misfit=misfit,
            late=0 if prompt else max(1, sum(launched not in calls for launched, *_ in works)),
            waited=sum(waited == launched and launched in calls for launched, waited, *_ in works),
            changed=sum(changed for *_, changed, _ in works),
            short=prompt and any(elements < size for (*_, elements), size in zip(works, filled))))
    return out


Seen = tuple[list[list[list[float]]], int, list[tuple[int, int, bool, int]], str]
"""Of a window: what finish gave by rank and bucket, whole gradients that outlived their backward, rank 0's
reduce-scatters (call of the launch, of the wait, changed in flight, elements), and a misuse of the wire."""


def told(answer: type, ranks: int, N: int, sizes: list[int], bases: list[list[list[float]]],
         order: tuple[int, ...]) -> list[Seen]:
    """Windows told call by call to all ranks in turn, on the side where the learner's class lives."""
    import torch

    wires: list[ScatterWire] = []
    mine = [call(answer, list(sizes), ScatterWire(wires, rank, ranks), shown=f"ScatterBuckets({sizes}, wire)")
            for rank in range(ranks)]  # fmt: skip
    out: list[Seen] = []
    for given in bases:
        for wire in wires:
            wire.works, wire.call = [], 0
        try:
            kept, found = _window(mine, wires, N, [torch.tensor(base) for base in given], order)
        except Broke:
            if misfit := next((wire.misfit for wire in wires if wire.misfit), ""):
                return [*out, ([], 0, [], misfit)]
            raise
        works = [(w.launched_in, w.waited_in, w.changed, w.elements) for w in wires[0].works]
        out.append((found, kept, works, ""))
    return out


def _window(mine: list, wires: list[ScatterWire], N: int, bases: list[Tensor],
            order: tuple[int, ...]) -> tuple[int, list[list[list[float]]]]:
    """The calls of one window. How many whole gradients outlive their backward, and what finish gave."""
    from torch.multiprocessing.reductions import StorageWeakRef

    kept, given = 0, []
    for i in range(N):
        for place, b in enumerate(order):
            for rank, one in enumerate(mine):
                gradient = bases[b] * (DIGIT**i * 2 * (rank + 1) / (len(mine) + 1))  # the mean over ranks is base · 8^i
                given.append(StorageWeakRef(gradient.untyped_storage()))
                wires[rank].call = i * (len(bases) + 1) + place
                call(one.bucket_full, b, gradient, shown=f"bucket_full({b}, gradient) in micro-step {i}")
                given += [StorageWeakRef(w._whole.untyped_storage()) for w in wires[rank].works[-1:]
                          if w._whole is not None]  # fmt: skip
                del gradient
        for rank, one in enumerate(mine):
            wires[rank].call = i * (len(bases) + 1) + len(bases)
            call(one.end_of_backward, shown=f"end_of_backward() of micro-step {i}")
        gc.collect(0)
        kept = max(kept, len({ref.cdata for ref in given if not ref.expired()}))
    found = []
    for rank, one in enumerate(mine):
        wires[rank].call = -1
        found.append(_parts(call(one.finish, shown=f"finish() on rank {rank}"), bases))
    return kept, found


def _parts(found: object, bases: list[Tensor]) -> list[list[float]]:
    import torch

    what = "finish() returns a list with a 1-D tensor for each bucket"
    if not isinstance(found, list | tuple) or len(found) != len(bases):
        shown = f"a list of {len(found)}" if isinstance(found, list | tuple) else f"a {type(found).__name__}"
        raise Broke(f"{what}, {len(bases)} here; this was {'None' if found is None else shown}")
    for part in found:
        if not isinstance(part, torch.Tensor) or part.dim() != 1:
            raise Broke(f"{what}; one of them was a {type(part).__name__}"
                        + (f" of {part.dim()} dimensions" if isinstance(part, torch.Tensor) else ""))
    return [part.detach().tolist() for part in found]


def _near(a: Tensor, b: Tensor) -> bool:
    import torch
    return a.shape == b.shape and torch.allclose(a, b.to(a.dtype), rtol=1e-5, atol=1e-4)


def _short(part: Tensor) -> str:
    return "[" + ", ".join(f"{value:g}" for value in part[:5].tolist()) + (", …]" if part.numel() > 5 else "]")
