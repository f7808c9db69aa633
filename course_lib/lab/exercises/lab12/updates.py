"""Two updates with the learner's `ShardedOptimizer` on ranks played in one process, and what one process has.

Torch is imported where it is used: looking at a hint must not load it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakSet

from course_lib.lab.exercises.lab09.group_wire import Calls, GroupWire
from course_lib.lab.exercises.lab09.replay import play
from course_lib.lab.guard import Broke, call, on_its_side

if TYPE_CHECKING:
    from torch import Tensor

UPDATES = 2
MISMATCH = "in one group at one time"
"""What the wire says of ranks that call different collectives. On a real wire they would wait, or mix them up."""
Factors = Callable[[list[float], int, float], Sequence[float]]
"""By which each segment of the gradient is scaled, from the norms of all segments, n, and max_norm."""


@dataclass(frozen=True)
class Case:
    """A training of two updates. `found[r][u]` are rank r's parameters after update u, `held[r]` the elements that its
    optimizers held, `waits` what the ranks wait for that came to no end."""

    ranks: int
    start: Tensor
    gradients: tuple[Tensor, ...]
    max_norms: tuple[float, ...]
    clips: bool
    found: tuple[list[Tensor], ...] = ()
    held: tuple[int, ...] = ()
    waits: str = ""
    gathered: bool = False

    @classmethod
    def drawn(cls, draw: random.Random, ranks: int, size: int, clips: bool) -> Case:
        """All norms are above 1, that of each full segment too. With `clips` they are above max_norm, without it
        their squares are below it."""
        import torch

        def numbers(low: float, high: float) -> Tensor:
            return torch.tensor([draw.choice((-1, 1)) * draw.uniform(low, high) for _ in range(size)])

        gradients = tuple(numbers(2, 6) for _ in range(UPDATES))
        limits = tuple(draw.uniform(0.2, 0.5) if clips else draw.uniform(3, 5) * float(g.norm()) ** 2
                       for g in gradients)
        return cls(ranks, numbers(0.5, 2), gradients, limits, clips)

    @property
    def size(self) -> int:
        return self.start.numel()

    @property
    def full(self) -> bool:
        """Whether every rank has a segment."""
        return self.size >= self.ranks

    def one_process(self, factors: Factors, add_up: bool = False, anew: bool = False) -> list[Tensor]:
        """The parameters after each update when each segment of the gradient is scaled by its factor: with the
        gradients added up, or with an optimizer that is made `anew` for each."""
        import torch

        whole = self.start.clone()
        optimizer, out = Momentum([whole]), []
        for number, (gradient, limit) in enumerate(zip(self.gradients, self.max_norms)):
            parts = gradient.tensor_split(self.ranks)
            scales = factors([float(part.norm()) for part in parts], self.ranks, limit)
            scaled = torch.cat([part * scale for part, scale in zip(parts, scales)])
            whole.grad = whole.grad + scaled if add_up and number else scaled
            optimizer = Momentum([whole]) if anew else optimizer
            optimizer.step()
            out.append(whole.clone())
        return out

    def expected(self, anew: bool = False) -> list[Tensor]:
        def factors(norms: list[float], n: int, limit: float) -> list[float]:
            norm = sum(one**2 for one in norms) ** 0.5
            return [min(1.0, limit / norm)] * n
        return self.one_process(factors, anew=anew)

    # what was seen

    def sharded(self) -> bool:
        return all(held <= -(-self.size // self.ranks) for held in self.held)

    def alike(self) -> bool:
        import torch

        return not self.waits and all(torch.equal(mine, first) for row in self.found
                                      for mine, first in zip(row, self.found[0]))  # fmt: skip

    def has_nan(self) -> bool:
        return any(bool(flat.isnan().any()) for row in self.found for flat in row)

    def unchanged(self) -> bool:
        return all(_near(flat, self.start) for row in self.found for flat in row)

    def late(self) -> bool:
        """Whether, after the last update, the others' segments are those of the update before, and the own is new; and
        so from the first."""
        if self.right(updates=1):
            return False
        for rank, row in enumerate(self.found):
            for place, (now, before) in enumerate(zip(row[-1].tensor_split(self.ranks),
                                                      row[-2].tensor_split(self.ranks))):
                theirs = self.found[place][-2].tensor_split(self.ranks)[place]
                if _near(now, before) if place == rank else not _near(now, theirs):
                    return False
        return True

    def right(self, updates: int = UPDATES) -> bool:
        return self._is(self.expected()[:updates])

    def matches(self, factors: Factors) -> bool:
        """Whether the first update is that of these factors."""
        return self._is(self.one_process(factors)[:1])

    def starts_anew(self) -> bool:
        return self._is(self.expected(anew=True))

    def adds_up(self) -> bool:
        return self._is(self.one_process(lambda norms, n, limit: [1.0] * n, add_up=True))

    def _is(self, wanted: list[Tensor]) -> bool:
        return not self.waits and all(_near(flat, want) for row in self.found for flat, want in zip(row, wanted))

    def __str__(self) -> str:
        said = f"{self.ranks} ranks, {self.size} parameters"
        if self.waits:
            return f"{said}: {self.waits}"
        if not self.sharded():
            return f"{said}: the optimizer of rank 0 holds {self.held[0]} elements"
        wanted = self.expected()
        for number, want in enumerate(wanted):
            for rank, row in enumerate(self.found):
                if not _near(row[number], want):
                    at = int((row[number] - want).abs().nan_to_num(float("inf")).argmax())
                    return (f"{said}: after update {number + 1} element {at} is {row[number][at]:.4g} on rank {rank}, "
                            f"and {want[at]:.4g} in one process")
        return f"{said}: right, but not the same to the bit on all ranks"


def played(answer: type, case: Case) -> Case:
    """The case with what the learner's class made of it."""
    import torch

    found, held, waits, gathered = on_its_side(trained, answer, case.ranks, case.start.tolist(),
                                               [g.tolist() for g in case.gradients], list(case.max_norms))
    rows = tuple([torch.tensor(flat) for flat in row] for row in found)
    return replace(case, found=rows, held=tuple(held), waits=waits, gathered=gathered)


class Momentum:
    """Stochastic gradient descent with momentum, elementwise, with a state as long as its tensors. torch's own takes
    seconds to import, which a check has not."""

    LR, MOMENTUM = 0.1, 0.9

    def __init__(self, params: Iterable[Tensor]) -> None:
        import torch

        self.params = [params] if isinstance(params, torch.Tensor) else list(params)
        self.velocities = [torch.zeros_like(p) for p in self.params]
        self.param_groups = [{"params": self.params, "lr": self.LR}]

    def step(self) -> None:
        import torch

        with torch.no_grad():
            for p, velocity in zip(self.params, self.velocities):
                if p.grad is not None:
                    velocity.mul_(self.MOMENTUM).add_(p.grad)
                    p.sub_(self.LR * velocity)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.params:
            p.grad = None if set_to_none or p.grad is None else p.grad.zero_()


def trained(answer: type, n: int, start: list[float], gradients: list[list[float]],
            max_norms: list[float]) -> tuple[list[list[list[float]]], list[int], str, bool]:
    """What the learner's class makes of some updates, on the side where it lives: the parameters by rank and update,
    the most elements that each rank's optimizers held at a time, what ranks wait for, and whether anything was
    gathered."""
    import torch

    calls = Calls()
    held, wires = [0] * n, {}

    def one(rank: int) -> list[list[float]]:
        wires[rank] = GroupWire(calls, rank, n)
        wire, flat = wires[rank].group(range(n)), torch.tensor(start)
        alive: WeakSet[Momentum] = WeakSet()

        def hold(optimizers: Iterable[Momentum]) -> None:
            held[rank] = max(held[rank], sum(p.numel() for optimizer in optimizers for p in optimizer.params))

        def make_optimizer(params: Iterable[Tensor]) -> Momentum:
            optimizer = Momentum(params)
            alive.add(optimizer)
            hold([optimizer])
            return optimizer

        mine = call(answer, flat, wire, make_optimizer, shown="ShardedOptimizer(flat, wire, make_optimizer)")
        out = []
        for number, (values, limit) in enumerate(zip(gradients, max_norms)):
            gradient = torch.full((len(values),), float("nan"))
            gradient.tensor_split(n)[rank].copy_(torch.tensor(values).tensor_split(n)[rank])
            call(mine.step, gradient, limit, shown=f"step(gradient, {limit:.3g}) of update {number + 1} on rank {rank} "
                                                   f"of {n}")  # fmt: skip
            hold(alive)
            out.append(flat.detach().tolist())
        return out

    try:
        ended = play(n, one, calls.known)
    except Broke as broke:
        if MISMATCH not in str(broke):
            raise
        return [[] for _ in range(n)], held, str(broke), False
    gathered = any(c.op == "all_gather" for wire in wires.values() for c in wire.log)
    return [ended.results.get(rank, []) for rank in range(n)], held, "; ".join(list(ended.waits.values())[:2]), gathered


def _near(a: Tensor, b: Tensor) -> bool:
    import torch
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)
