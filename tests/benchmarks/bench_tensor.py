"""Chunks inside a tensor-parallel pair: how much of its communication do they hide?"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from course_lib.launch import Fabric, run
from course_lib.launch.fabric import shaped_works
from course_lib.score import fair_score
from course_lib.simulate.chunked import Operator, hideable_s, predict_chunked, step_s
from course_lib.simulate.link import LinkCost
from course_lib.timeline import Timeline
from tests.benchmarks.harness import Figure, benchmark, half_iqr

WIRE = Fabric(gbit=1.0, latency_us=500, kind="shaped" if shaped_works() else "paced")
RANKS, ROUNDS, CHUNKS = 2, 15, 8
ROWS, WIDTH, HIDDEN = 4096, 256, 16  # of the whole sequence and of one rank's part of the MLP; 4 MB travel
MATMUL_MS = 40.0


@benchmark
def chunked_tensor_parallel() -> Iterator[Figure]:
    """A sequence-parallel MLP pair, forward and backward, in 8 chunks, against the same pair that waits for each of
    its four collectives, in alternation; two ranks, 4 MB, 40 ms a matmul."""
    rows = run(_measured, ranks=RANKS, fabric=WIRE, timeout_s=300)
    gather, scatter, seconds, _ = rows[0]
    lines = {name: Timeline.merge(row[3][name] for row in rows) for name in seconds}
    Tc, Tm = (_seconds_of(lines["waiting"], kind) for kind in ("compute", "comm"))
    operators = pair(MATMUL_MS / 1e3, 4 * ROWS * WIDTH, gather, scatter)

    def score(name: str) -> list[float]:
        return [fair_score(a, b, Tc, Tm).value or 0.0 for a, b in zip(seconds["waiting"], seconds[name])]

    yield Figure("chunked TP overlap, hidden of what is hideable", statistics.median(score("chunks")), "ratio",
                 half_iqr(score("chunks")), 0.70, ">=", note=f"F of {ROUNDS} pairs; waiting "
                 f"{statistics.median(seconds['waiting']) * 1e3:.0f} ms, {CHUNKS} chunks "
                 f"{statistics.median(seconds['chunks']) * 1e3:.0f} ms, Tc {Tc * 1e3:.0f} ms, Tm {Tm * 1e3:.0f} ms; by "
                 f"the fitted costs {hideable_s(operators) * 1e3:.0f} ms can be hidden inside the operators")
    predicted = step_s(predict_chunked(operators, CHUNKS))
    off = [took / predicted - 1 for took in seconds["chunks"]]
    yield Figure("chunked TP step against the simulator", abs(statistics.median(off)), "of the step", half_iqr(off),
                 0.05, "<=", note=f"predicted {predicted * 1e3:.0f} ms; in one piece, where only the gradient of a "
                 f"weight hides anything, {statistics.median(score('one piece')):.0%} are hidden")


def pair(matmul_s: float, nbytes: float, gather: LinkCost, scatter: LinkCost) -> list[Operator]:
    """Forward: gather and up, down and scatter. Backward: gather and both gradients of down; the gradient of up's
    input and scatter, then that of its weight."""
    return [Operator("gather", matmul_s, nbytes, gather), Operator("scatter", matmul_s, nbytes, scatter),
            Operator("gather", 2 * matmul_s, nbytes, gather),
            Operator("scatter", matmul_s, nbytes, scatter, spare_s=matmul_s)]


def _seconds_of(timeline: Timeline, kind: str) -> float:
    """Of a kind in one step: the least of any rank, which waited for no other; median over steps."""
    return statistics.median(min(sum(s.stop - s.start for s in timeline.select(rank=rank, kind=kind, step=step))
                                 for rank in timeline.ranks) for step in timeline.steps) / 1e9


def _measured() -> tuple[LinkCost, LinkCost, dict[str, list[float]], dict[str, Timeline]]:
    import torch
    import torch.nn.functional as F

    from course_lib.launch.measure import measure
    from course_lib.tensor import all_gather, gather_linear, linear_scatter, reduce_scatter
    from course_lib.tensor.emulated import EmulatedMatmuls
    from course_lib.tune.alternate import Step, alternate

    torch.set_num_threads(1)
    x = torch.randn(ROWS // RANKS, WIDTH, requires_grad=True)
    up, down = torch.randn(HIDDEN, WIDTH, requires_grad=True), torch.randn(WIDTH, HIDDEN, requires_grad=True)

    def waiting() -> torch.Tensor:
        return reduce_scatter(F.linear(F.linear(all_gather(x, -2, None), up), down), -2, None)

    def in_chunks(chunks: int) -> torch.Tensor:
        return linear_scatter(gather_linear(x, up, None, chunks), down, None, chunks)

    def step(pair) -> Step:
        def run() -> None:
            with EmulatedMatmuls(MATMUL_MS * 1e6 / (ROWS * WIDTH * HIDDEN)):
                y = pair()
                y.backward(y)

        return Step(run)

    size = 4 * ROWS * WIDTH
    gather, scatter = (measure(kind, sizes=(size // 8, size // 2, size)) for kind in ("all_gather", "reduce_scatter"))
    seconds, lines = alternate({"waiting": step(waiting), "chunks": step(lambda: in_chunks(CHUNKS)),
                                "one piece": step(lambda: in_chunks(1))}, ROUNDS, 2)
    return gather, scatter, seconds, lines
