"""A benchmark is a function that yields figures; a figure is a number with its spread and its goal."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Figure:
    """One line of `bench.json`. `direction` says which side of the goal is good: `<=` or `>=`."""

    name: str
    value: float
    unit: str
    spread: float
    goal: float
    direction: str
    command: str = ""
    note: str = ""

    @property
    def reached(self) -> bool:
        return self.value <= self.goal if self.direction == "<=" else self.value >= self.goal

    def row(self) -> dict:
        return {**asdict(self), "reached": self.reached}


BENCHMARKS: dict[str, Callable[[], Iterable[Figure]]] = {}


def benchmark(function: Callable[[], Iterable[Figure]]) -> Callable[[], Iterable[Figure]]:
    """Register a benchmark under the function's name."""
    BENCHMARKS[function.__name__] = function
    return function


def median_interval(values: Sequence[float], level: float = 0.95, draws: int = 4000) -> tuple[float, float]:
    """Bootstrap confidence interval of the median (seeded, so that a file of results gives one answer)."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(draws))
    return medians[round(draws * (1 - level) / 2)], medians[round(draws * (1 + level) / 2) - 1]
