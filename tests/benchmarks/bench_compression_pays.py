"""Whether compression pays in wall time: seconds to a fixed loss against the best overlapped uncompressed training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

from course_lib.lab.workbench.race import FLOAT32, race
from course_lib.launch import Fabric
from course_lib.spread import half_iqr
from tests.benchmarks.harness import Figure, benchmark

_SEEDS = range(5)
_LOSS, _UPDATES = 2.9, 160
_SHAPE, _ROWS = {"length": 32, "layers": 2, "heads": 4, "width": 256}, 2
"""1.65 million parameters and 64 tokens a rank: on one core the gradient takes longer at 1 Gbit/s than to compute."""
_MOMENTUM, _PLAIN = {"sgd": (0.05, 0.9)}, {"sgd": (0.3, 0.0)}
_ENTRIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{FLOAT32}, buckets of {mb} MB": ("", {"bucket_mb": mb, **_MOMENTUM}) for mb in (0.5, 1.0, 4.0)},
    "fp16": ("fp16", {"bucket_mb": 1.0, **_MOMENTUM}),
    "PowerSGD": ("powersgd", {"bucket_mb": 4.0, "rank": 4, **_MOMENTUM}),
    "1-bit": ("onebit", {"bucket_mb": 1.0, **_PLAIN}), "top 1 %": ("topk", {"bucket_mb": 1.0, "k": 0.01, **_PLAIN})}
"""Everyone with the optimizer that suits it: float32 reaches the loss in fewest updates with momentum."""


@benchmark
def compression_pays() -> Iterator[Figure]:
    """A small GPT on real text, real compute on two ranks. At 1 Gbit/s r = Tm/Tc is above 1, and the goal is 1.5 for
    one scheme at least. On a wire without a limit nothing is to be won, and the figure says how much is not."""
    free = race({FLOAT32: _ENTRIES[f"{FLOAT32}, buckets of 1.0 MB"]}, fabric="loopback", shape=_SHAPE, rows=_ROWS,
                max_updates=20, look_every=20)[FLOAT32]  # fmt: skip
    for wire, gbit, goal, direction in ((Fabric(gbit=1.0), 1.0, 1.5, ">="), ("loopback", math.inf, 1.5, "<=")):
        speedups: dict[str, list[float]] = {name: [] for name in _ENTRIES if FLOAT32 not in name}
        plain = []
        for seed in _SEEDS:
            laps = race(_ENTRIES, fabric=wire, shape=_SHAPE, rows=_ROWS, until_loss=_LOSS, max_updates=_UPDATES,
                        look_every=5, seed=seed, timeout_s=600)
            best = min((lap for name, lap in laps.items() if FLOAT32 in name), key=lambda lap: lap.reaches(_LOSS))
            plain.append(min(best.reaches(_LOSS), best.seconds[-1]))  # one that never arrives needed that at least
            for name, values in speedups.items():
                values.append(plain[-1] / laps[name].reaches(_LOSS))
        said = f"{gbit:g} Gbit/s" if gbit < math.inf else "a wire without a limit"
        name = max(speedups, key=lambda each: statistics.median(speedups[each]))
        others = ", ".join(f"{each} {statistics.median(values):.2f}" for each, values in speedups.items())
        yield Figure(f"{name} over the best overlapped float32, {said}", statistics.median(speedups[name]),
                     f"times as fast to a loss of {_LOSS:g}", half_iqr(speedups[name]), goal, direction,
                     note=f"r = {free.bytes * 8e-9 / gbit / free.step_s:.2f}; float32 needs "
                          f"{statistics.median(plain):.1f} s; {others}; {len(_SEEDS)} seeds")
