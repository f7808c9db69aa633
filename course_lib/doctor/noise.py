"""How quiet is this machine? A short calibrated loop and short sleeps, many times each.

A timing verdict of a lab compares runs that differ by some ten per cent. Where the same loop takes 20 % more or
less from one time to the next, no verdict can be trusted, and the labs say so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from course_lib.doctor.finding import Finding

LOOP_MS, SLEEP_MS = 4.0, 2.0
LOOPS, SLEEPS = 60, 60
QUIET, LOUD = 0.05, 0.15
"""Spread of the loop (see `Spread.relative`): below the first nothing is said, above the second it is a warning."""


@dataclass(frozen=True)
class Spread:
    """Fastest, median, interquartile range and 95th percentile, in milliseconds."""

    fastest_ms: float
    median_ms: float
    iqr_ms: float
    p95_ms: float

    @property
    def relative(self) -> float:
        """Interquartile range over median, or how far the median is above the fastest, whichever is more.

        A neighbour that always takes its turn makes every time equally long: the quartiles alone call that quiet.
        """
        return max(self.iqr_ms / self.median_ms, self.median_ms / self.fastest_ms - 1) if self.fastest_ms > 0 else 0.0


def examine() -> tuple[Finding, ...]:
    """Takes half a second; longer on a busy machine, which is the point."""
    return loop_finding(measure_loop()), sleep_finding(measure_sleeps())


def measure_loop() -> Spread:
    """The same pure Python loop again and again, sized to take about `LOOP_MS`."""
    count = 20_000
    fastest = min(_milliseconds(lambda: _spin(count)) for _ in range(5))
    count = max(1000, int(count * LOOP_MS / fastest))
    return spread([_milliseconds(lambda: _spin(count)) for _ in range(LOOPS)])


def measure_sleeps() -> Spread:
    """How long a sleep of `SLEEP_MS` really takes."""
    return spread([_milliseconds(lambda: time.sleep(SLEEP_MS / 1e3)) for _ in range(SLEEPS)])


def spread(times_ms: list[float]) -> Spread:
    """Needs at least two times."""
    low, _, high = statistics.quantiles(times_ms, n=4)
    return Spread(min(times_ms), statistics.median(times_ms), high - low, statistics.quantiles(times_ms, n=20)[-1])


def loop_finding(seen: Spread) -> Finding:
    """A verdict on the spread of the loop."""
    level = "ok" if seen.relative < QUIET else "note" if seen.relative < LOUD else "warn"
    remedy = "" if level == "ok" else "close what else runs; timing verdicts need a quieter machine"
    return Finding("loop", level, "a fixed loop", f"{seen.median_ms:.2f} ms ± {seen.relative:.0%}",
                   f"spread; the fastest took {seen.fastest_ms:.2f} ms, one in twenty over {seen.p95_ms:.2f} ms",
                   remedy, "", {"fastest_ms": seen.fastest_ms, "median_ms": seen.median_ms, "spread": seen.relative,
                                "p95_ms": seen.p95_ms})


def sleep_finding(seen: Spread) -> Finding:
    """A verdict on how late sleeps end: the emulated device lives by them."""
    late, worst = seen.median_ms - SLEEP_MS, seen.p95_ms - SLEEP_MS
    level = "ok" if worst < 1.0 else "note" if worst < 4.0 else "warn"
    remedy = "" if level == "ok" else "emulated devices end late here; close what else runs"
    return Finding("sleep", level, f"sleeps of {SLEEP_MS:g} ms", f"{late:.2f} ms late",
                   f"median; one in twenty is over {worst:.2f} ms late", remedy, "",
                   {"asked_ms": SLEEP_MS, "median_ms": seen.median_ms, "spread": seen.relative, "p95_ms": seen.p95_ms})


def _spin(count: int) -> int:
    total = 0
    for i in range(count):
        total += i
    return total


def _milliseconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return (time.perf_counter() - start) * 1e3
