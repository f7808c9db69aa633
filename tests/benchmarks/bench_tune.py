"""What `tune.choose` picks, measured against the best that an exhaustive search on the same ranks finds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

from course_lib.launch import run
from course_lib.spread import half_iqr
from course_lib.tune import calibrate
from tests.benchmarks.bench_overlap import fabric
from tests.benchmarks.harness import Figure, benchmark, median_interval

GRID_MB = (0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 25)
RUNS, DUELS = 3, 15


class Duel(NamedTuple):
    """Names of what tuning chose and of the best that was found otherwise; step of the former over the latter, pair by
    pair; how many layouts each search measured; r."""

    chosen: str
    best: str
    ratios: list[float]
    measured: int
    searched: int
    r: float


@benchmark
def tune_against_exhaustive() -> Iterator[Figure]:
    """Step of tune's choice over the step of the best of a fine grid of caps, the plan and DDP's default.

    The best of many noisy medians is too good: the grid only names four finalists, fresh repetitions name the best
    of them, and fresh pairs again compare it with tune's choice.
    """
    for profile, r in (("gpt", 1.0), ("equal", 0.65)):
        duels = [run(_duel, calibrate(r, fabric(), profile=profile), fabric=fabric(), timeout_s=600)[0]
                 for _ in range(RUNS)]
        pairs = [ratio for duel in duels for ratio in duel.ratios]
        note = "; ".join(f"{d.chosen} against {d.best}: {statistics.median(d.ratios):.4f}, {d.measured} of "
                         f"{d.searched} layouts measured, r {d.r:.2f}" for d in duels)
        low, high = median_interval(pairs)
        note = f"{len(pairs)} pairs in {RUNS} runs, 95 % interval of the median {low:.4f} to {high:.4f}: {note}"
        yield Figure(f"step of tune's choice / best step, {profile}, r = {r}", statistics.median(pairs), "ratio",
                     half_iqr(pairs), 1.02, "<=", note=note)


def _duel(load) -> Duel:
    """On a rank. Seconds are those of the slowest rank, the same everywhere, so all ranks decide alike."""
    from course_lib.tune.alternate import alternate
    from course_lib.tune.choice import Choice
    from course_lib.tune.choose import CAPS_MB, choose_on_rank, layouts, predictions, shortlist
    from course_lib.tune.sweep import merged, tiny_micro_step
    from course_lib.tune.update import Updates

    profile, link, predicted, measured = choose_on_rank(load.model, None, 1, CAPS_MB, 4, 9)
    found = Choice(profile, link, predicted, merged([measured]))
    everything = predictions(profile, link, GRID_MB)
    options = layouts(everything) | layouts(predicted)
    updates = Updates(load.model, tiny_micro_step, 1)

    def medians(names: list[str], repeats: int) -> dict[str, float]:
        seconds, _ = alternate({n: updates.of("ddp", options[n]) for n in names}, repeats)
        return {n: statistics.median(times) for n, times in seconds.items()}

    grid = shortlist(everything, len(everything))
    screened = medians(grid, 5)
    again = medians(sorted(screened, key=screened.__getitem__)[:4], 9)
    best = min(again, key=again.__getitem__)
    sides = {"tune": updates.of("ddp", options[found.best]), "best": updates.of("ddp", options[best])}
    seconds, _ = alternate(sides, DUELS)
    return Duel(found.best, best, [a / b for a, b in zip(seconds["tune"], seconds["best"])], len(found.candidates),
                len(grid), found.r)
