"""Several ranks in one process for exercise 4.3: a fake wire whose tensors are summed when a handle is waited for.

Torch is imported where it is used: looking at a hint must not load it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from course_lib.lab.exercises.lab04.fake_wire import FakeWire, FakeWork
from course_lib.lab.offered import offers

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

SHAPES = [(2,), (3,), (2, 2), (1, 3), ()]


class Window(NamedTuple):
    """One window of one rank: the calls of the hook in order, each with what that micro-step adds to the gradient."""

    number: int
    calls: list[tuple[int, Tensor]]


@offers("wait", "is_completed")
class SummingWork(FakeWork):
    """A bucket on its way. The sum is there once it is waited for, not before."""

    def __init__(self, wire: SummingWire, bucket: int, total: Tensor, version: int) -> None:
        super().__init__(wire, bucket)
        self._total, self._version, self._arrived = total, version, False

    def wait(self, timeout: object = None) -> bool:
        super().wait(timeout)
        if not self._arrived:
            flat = self._wire.memory[self.bucket]
            if flat._version != self._version:
                self._wire.touched.append(self.bucket)
            flat.copy_(self._total)
            self._arrived = True
        return True


@offers("launch", "ranks", "flat", "views")
class SummingWire(FakeWire):
    """The wire of one rank. `others` are those of the other ranks, which have been through all windows before."""

    def __init__(self, plan: Plan, others: Sequence[SummingWire]) -> None:
        import torch

        super().__init__(len(plan.buckets))
        self.ranks, self._others = plan.ranks, others
        self.memory = [torch.zeros(sum(plan.elements(i) for i in bucket)) for bucket in plan.buckets]
        self.flat, self.views = list(self.memory), {}
        for flat, bucket in zip(self.memory, plan.buckets):
            for index, part in zip(bucket, flat.split([plan.elements(i) for i in bucket])):
                self.views[index] = part.view(plan.shapes[index])
        self.sent: dict[tuple[int, int], Tensor] = {}
        self.touched: list[int] = []
        self.window = 0

    def begin(self, window: int) -> None:
        self.window, self.events, self.touched = window, [], []

    def launch(self, bucket: int) -> FakeWork:
        """From here to the wait() the memory of the bucket belongs to the wire, and holds nothing of use."""
        super().launch(bucket)
        flat, key = self.memory[bucket], (self.window, bucket)
        total = self.sent[key] = flat.clone()
        for other in self._others:
            total = total + other.sent.get(key, 0)
        flat.fill_(float("nan"))
        return SummingWork(self, bucket, total, flat._version)


@dataclass(frozen=True)
class Plan:
    """A model, its buckets, and what happens in three windows on each rank."""

    ranks: int
    buckets: list[list[int]]
    uses: dict[int, int]
    shapes: dict[int, tuple[int, ...]]
    windows: list[list[Window]]

    @classmethod
    def drawn(cls, draw: random.Random, skips: int) -> Plan:
        """In the first window nothing is skipped (0), or rank 0 (1) or rank 1 (2) skips a parameter, or rank 0 skips
        it in the last micro-step (3). In the second rank 0 skips one that it has used in the first."""
        count, ranks = draw.randint(4, 7), draw.randint(2, 4)
        micro_steps = 2 if skips == 3 else draw.randint(1, 2)
        ids = list(range(count))[::-1]
        cuts = sorted(draw.sample(range(1, count), draw.randint(1, 3)))
        buckets = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, count])]
        shapes = {index: draw.choice(SHAPES) for index in ids}
        one, two = draw.sample(ids, 2)
        steps = range(micro_steps)
        left_out = {(0, 1, two, step) for step in steps}
        left_out |= {(skips == 2, 0, one, step) for step in steps if skips and (skips < 3 or step == micro_steps - 1)}
        plan = cls(ranks, buckets, dict.fromkeys(ids, micro_steps), shapes, [])
        for rank in range(ranks):
            plan.windows.append([])
            for number in range(3):
                order = ids if draw.random() < 0.5 else draw.sample(ids, count)
                calls = [(i, plan.gradient(i, draw)) for step in steps for i in order
                         if (rank, number, i, step) not in left_out]  # fmt: skip
                plan.windows[rank].append(Window(number, calls))
        return plan

    def gradient(self, index: int, draw: random.Random) -> Tensor:
        """All elements well above 0, so that sums, means and what is missing can be told apart."""
        import torch

        return torch.tensor([draw.uniform(0.5, 1.5) for _ in range(self.elements(index))]).view(self.shapes[index])

    def elements(self, index: int) -> int:
        return math.prod(self.shapes[index])

    def parameters(self) -> dict[int, Parameter]:
        import torch

        return {index: torch.nn.Parameter(torch.zeros(self.shapes[index])) for index in self.uses}

    def due(self, window: Window) -> list[int]:
        """The buckets that can leave during backward: full, and all before them too."""
        left = dict(self.uses)
        for index, _ in window.calls:
            left[index] -= 1
        full = [not any(left[index] for index in bucket) for bucket in self.buckets]
        return list(range(full.index(False) if False in full else len(full)))

    def summed(self, rank: int, number: int) -> dict[int, Tensor]:
        """What each parameter's gradient adds up to on this rank in this window. Zero for an unused one."""
        import torch

        total = {index: torch.zeros(self.shapes[index]) for index in self.uses}
        for index, part in self.windows[rank][number].calls:
            total[index] = total[index] + part
        return total


@dataclass(frozen=True)
class Played:
    """What rank 0 did in one window, and what should have come of it."""

    number: int
    ranks: int
    buckets: list[list[int]]
    calls: list[int]
    due: list[int]
    launches: list[tuple[int, bool]]
    waited: list[int]
    touched: list[int]
    inside: list[int]
    grads: dict[int, Tensor | None]
    local: dict[int, Tensor]
    expected: dict[int, Tensor]

    @classmethod
    def of(cls, wire: SummingWire, params: dict[int, Parameter], plan: Plan, window: Window) -> Played:
        import torch

        calls = [index for index, _ in window.calls]
        launches = [(event.bucket, event.during < len(calls)) for event in wire.launches()]
        memory = {flat.untyped_storage().data_ptr() for flat in wire.memory}
        found = {index: param.grad for index, param in params.items()}
        inside = [i for i, grad in found.items() if grad is not None and grad.untyped_storage().data_ptr() in memory]
        grads = {i: None if grad is None else grad.detach().clone() for i, grad in found.items()}
        parts = [plan.summed(rank, window.number) for rank in range(plan.ranks)]
        expected = {i: torch.stack([part[i] for part in parts]).mean(0) for i in found}
        return cls(window.number, plan.ranks, plan.buckets, calls, plan.due(window), launches,
                   [event.bucket for event in wire.waits()], list(wire.touched), inside, grads, parts[0],
                   expected)  # fmt: skip

    @property
    def launched(self) -> list[int]:
        return [bucket for bucket, _ in self.launches]

    @property
    def used(self) -> list[int]:
        return [index for index in self.local if index in self.calls]

    @property
    def unused(self) -> list[int]:
        return [index for index in self.local if index not in self.calls]

    @property
    def unwaited(self) -> list[int]:
        return [bucket for bucket in self.launched if bucket not in self.waited]

    def left_in_backward(self) -> list[int]:
        return [bucket for bucket, in_backward in self.launches if in_backward]

    @property
    def launches_whole(self) -> bool:
        return (self.left_in_backward() == self.due and self.launched == list(range(len(self.buckets)))
                and not self.unwaited and not self.touched and not self.inside)  # fmt: skip

    @property
    def whole(self) -> bool:
        return self.launches_whole and all(self.right(index) for index in self.local)

    def equals(self, index: int, value: Tensor) -> bool:
        import torch

        grad = self.grads[index]
        return grad is not None and grad.shape == value.shape and torch.allclose(grad, value, rtol=1e-4, atol=1e-6)

    def right(self, index: int) -> bool:
        return self.equals(index, self.expected[index])

    def __str__(self) -> str:
        left = [f"{bucket}{'' if in_backward else ' in finish'}" for bucket, in_backward in self.launches]
        parts = [f"window {self.number + 1} of {self.ranks} ranks, buckets {self.buckets}"]
        parts += [f"hook called for {self.calls}", f"launched {', '.join(left) or 'nothing'}"]
        if self.unwaited:
            parts.append(f"no wait for {', '.join(map(str, self.unwaited))}")
        if self.touched:
            parts.append(f"changed before its wait: bucket {', '.join(map(str, self.touched))}")
        wrong = [i for i in self.local if not self.right(i)]
        if self.launches_whole and wrong:
            index = wrong[0]
            parts.append(f".grad of {index} is {_first(self.grads[index])}, the mean is {_first(self.expected[index])}")
        if self.inside:
            parts.append(f".grad of {self.inside[0]} lies in the bucket")
        return "; ".join(parts)


def _first(value: Tensor | None) -> str:
    """The first number of a tensor: enough to tell a sum from a mean."""
    if value is None:
        return "None"
    return f"{value.flatten()[0]:.3f}" + (", …" if value.numel() > 1 else "")
