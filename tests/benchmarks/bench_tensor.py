"""Chunks inside a tensor-parallel pair: how much of its communication do they hide?"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from course_lib.lab.workbench.tensor import pair_runs
from course_lib.launch import Fabric
from course_lib.launch.fabric import shaped_works
from course_lib.score import fair_score
from course_lib.simulate.chunked import hideable_s, predict_chunked, step_s
from course_lib.spread import half_iqr
from course_lib.timeline import Timeline
from tests.benchmarks.harness import Figure, benchmark

WIRE = Fabric(gbit=1.0, latency_us=500, kind="shaped" if shaped_works() else "paced")
ROUNDS, CHUNKS = 15, 8


@benchmark
def chunked_tensor_parallel() -> Iterator[Figure]:
    """A sequence-parallel MLP pair, forward and backward, in 8 chunks, against the same pair that waits for each of
    its four collectives, in alternation on two ranks; 4 MB, a matmul twice as long as a gather."""
    found = pair_runs((1, CHUNKS), r=0.5, mb=4, fabric=WIRE, repeats=ROUNDS)
    chunks, waiting = found[f"{CHUNKS} chunks"], found["waiting"]
    Tc, Tm = (_seconds_of(waiting.timeline, kind) for kind in ("compute", "comm"))

    def score(seconds: tuple[float, ...]) -> list[float]:
        return [fair_score(a, b, Tc, Tm).value or 0.0 for a, b in zip(waiting.seconds, seconds)]

    hidden = score(chunks.seconds)
    yield Figure("chunked TP overlap, hidden of what is hideable", statistics.median(hidden), "ratio",
                 half_iqr(hidden), 0.70, ">=", note=f"F of {ROUNDS} pairs; waiting {waiting.median_s * 1e3:.0f} ms, "
                 f"{CHUNKS} chunks {chunks.median_s * 1e3:.0f} ms, Tc {Tc * 1e3:.0f} ms, Tm {Tm * 1e3:.0f} ms; by the "
                 f"fitted costs {hideable_s(found.pair()) * 1e3:.0f} ms can be hidden inside the operators")
    predicted = step_s(predict_chunked(found.pair(), CHUNKS))
    off = [took / predicted - 1 for took in chunks.seconds]
    whole = statistics.median(score(found["1 chunk"].seconds))
    yield Figure("chunked TP step against the simulator", abs(statistics.median(off)), "of the step", half_iqr(off),
                 0.05, "<=", note=f"predicted {predicted * 1e3:.0f} ms; in one piece, where only the gradient of a "
                 f"weight hides anything, {whole:.0%} are hidden")


def _seconds_of(timeline: Timeline, kind: str) -> float:
    """Of a kind in one step: the least of any rank, which waited for no other; median over steps."""
    return statistics.median(min(sum(s.stop - s.start for s in timeline.select(rank=rank, kind=kind, step=step))
                                 for rank in timeline.ranks) for step in timeline.steps) / 1e9
