"""Lists of gradients for exercise 4.5, every plan of a short one, and what a plan is worth."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from typing import NamedTuple

from course_lib.link_cost import LinkCost
from course_lib.simulate.buckets import GradientProfile, best_plan, finish_times


class Case(NamedTuple):
    """One call, and what came back."""

    sizes: list[int]
    ready: list[float]
    a: float
    beta: float
    got: list[int]

    def finish(self, plan: Sequence[int], a: float | None = None) -> list[float]:
        """f of each bucket. Another latency can be tried out."""
        latency, out = self.a if a is None else a, [0.0]
        for start, stop in pairwise(accumulate(plan, initial=0)):
            out.append(max(out[-1], self.ready[stop - 1]) + latency + self.beta * sum(self.sizes[start:stop]))
        return out[1:]

    def last(self, plan: Sequence[int]) -> float:
        return self.finish(plan)[-1]

    def least(self, plan: Sequence[int], cost: Callable[[Sequence[int]], float]) -> bool:
        """Whether no plan costs less. Tries them all."""
        return cost(plan) <= min(map(cost, all_plans(len(self.sizes)))) * (1 + 1e-9)

    def uniform(self) -> bool:
        """Whether one length, or one number of bytes, explains the plan."""
        parts = [self.sizes[start:] for start in range(len(self.sizes))]
        caps = {held for part in parts for held in accumulate(part)}
        by_bytes = [list(chunks(self.sizes, cap)) for cap in caps]
        return self.got in by_bytes or self.got in [list(chunks([1] * len(self.sizes), n)) for n in self.got]

    def __str__(self) -> str:
        best = min(all_plans(len(self.sizes)), key=self.last)
        return (f"{shown(*self[:4])} gave {self.got}, which finishes at {self.last(self.got):.6g} s; "
                f"{list(best)} finishes at {self.last(best):.6g} s")  # fmt: skip


def best_finish(sizes: list[int], ready: list[float], a: float, beta: float) -> float:
    """When the last bucket of the best plan finishes, in seconds; for lists of any length."""
    names = tuple(str(index) for index in range(len(sizes)))
    profile, link = GradientProfile(names, tuple(sizes), tuple(ready), 0.0, ready[-1]), LinkCost(a, beta)
    return finish_times(profile, link, best_plan(profile, link))[-1]


def all_plans(count: int) -> Iterator[tuple[int, ...]]:
    """All 2ⁿ⁻¹ ways to cut a list of `count` into lengths."""
    for cuts in range(count):
        for places in combinations(range(1, count), cuts):
            yield tuple(stop - start for start, stop in pairwise((0, *places, count)))


def chunks(sizes: Sequence[int], cap: int) -> Iterator[int]:
    """Lengths of buckets that close at `cap`."""
    held = length = 0
    for size in sizes:
        held, length = held + size, length + 1
        if held >= cap:
            yield length
            held = length = 0
    if length:
        yield length


def drawn(draw: random.Random, count: int) -> tuple[list[int], list[float], float, float]:
    """A model and a wire. All are multiples of powers of two, so that sums of times are exact and ties are ties."""
    sizes = [draw.randint(1, 4) * 2**18 for _ in range(count)]
    gap = draw.randint(1, 8)
    ready = list(accumulate(draw.randint(1, gap) / 1024 for _ in range(count)))
    return sizes, ready, draw.randint(1, 10) / 1024, 2.0**-27


def shown(sizes: list[int], ready: list[float], a: float, beta: float) -> str:
    times = ", ".join(f"{second:.6g}" for second in ready)
    return f"best_plan({sizes}, [{times}], {a:.6g}, {beta:.6g})"
