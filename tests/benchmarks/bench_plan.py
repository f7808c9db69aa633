"""The planner: errors against published runs, and how long its answers take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

from course_lib.plan import Layout, cluster, model
from course_lib.plan.pipeline import replay
from course_lib.plan.search import search
from course_lib.plan.timing import _stage_of
from course_lib.plan.validate import compare, summaries
from course_lib.spread import half_iqr
from tests.benchmarks.harness import Figure, benchmark

ROUNDS = 7


@benchmark
def planner_errors() -> Iterator[Figure]:
    """Absolute relative errors of predicted step times and memory, by source."""
    found = {(s.source, s.unit): s for s in summaries(compare())}
    table = found["korthikanti", "s"]
    yield Figure("planner: arXiv 2205.05198 Table 5, mean error", table.mean, "", 0.0, 0.04, "<=", note="8 rows")
    yield Figure("planner: arXiv 2205.05198 Table 5, worst error", table.worst, "", 0.0, 0.09, "<=", note="8 rows")
    yield Figure("planner: LLaMA, median error", found["touvron", "s"].median, "", 0.0, 0.10, "<=",
                 note="3 rows, assumed layouts")
    memory = max(s.worst for s in found.values() if s.unit == "bytes")
    yield Figure("planner: memory, worst error", memory, "", 0.0, 0.10, "<=", note="19 rows")


@benchmark
def planner_speed() -> Iterator[Figure]:
    """Seconds for every layout of a cluster, and for the replay of one step."""
    seven, large = model("7B"), model("175B")
    small, huge = cluster("a100-80", 64), cluster("h100", 16384)
    layout = Layout(8, 16, stage=1)
    yield _timed("planner: all layouts of 7B on 64 GPUs", 1.0, lambda: search(seven, small, 1024))
    yield _timed("planner: all layouts of 175B on 16,384 GPUs", 10.0, lambda: search(large, huge, 4096))
    yield _timed("planner: replay of a 1F1B step on 16,384 GPUs", 2.0, lambda: replay(large, huge, layout, 4096))


def _timed(name: str, goal: float, work: Callable[[], object]) -> Figure:
    seconds = []
    for _ in range(ROUNDS):
        _stage_of.cache_clear()
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return Figure(name, statistics.median(seconds), "s", half_iqr(seconds), goal, "<=", note=f"{ROUNDS} rounds")
