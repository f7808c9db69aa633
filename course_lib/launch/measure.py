"""Fit what one collective costs on this fabric: trains of back-to-back collectives through the same Wire.

Nominal figures are never used for a prediction. A train keeps the wire busy as a backward pass with
buckets does, so that its time divided by its length is what one bucket occupies.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from course_lib import record
from course_lib.launch.renamed import all_gather_single, reduce_scatter_single
from course_lib.link_cost import LinkCost

MB = 2**20


def _all_reduce(nbytes: int, group) -> Callable[[], dist.Work]:
    buffer = torch.zeros(max(1, nbytes // 4))
    return lambda: dist.all_reduce(buffer, group=group, async_op=True)


def _all_gather(nbytes: int, group) -> Callable[[], dist.Work]:
    size = dist.get_world_size(group)
    part = torch.zeros(max(1, nbytes // 4 // size))
    whole = torch.zeros(part.numel() * size)
    return lambda: all_gather_single(whole, part, group=group, async_op=True)


def _reduce_scatter(nbytes: int, group) -> Callable[[], dist.Work]:
    size = dist.get_world_size(group)
    part = torch.zeros(max(1, nbytes // 4 // size))
    whole = torch.zeros(part.numel() * size)
    return lambda: reduce_scatter_single(part, whole, group=group, async_op=True)


_COLLECTIVES = {"all_reduce": _all_reduce, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter}


def train_time_s(issue: Callable[[], dist.Work], length: int, group=None) -> float:
    """Seconds a collective takes inside a train of `length`, the slowest rank's. Collective call."""
    dist.barrier(group)
    start = record.now()
    works = [issue() for _ in range(length)]
    for work in works:
        work.wait()
    took = torch.tensor([(record.now() - start) / length / 1e9], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX, group=group)
    return float(took)


def measure(collective: str = "all_reduce", sizes: Sequence[int] = (MB // 4, MB, 2 * MB, 4 * MB, 8 * MB),
            repeats: int = 3, group=None) -> LinkCost:
    """Fit latency a (seconds of one collective) and β (seconds per byte) on the ranks of a run.

    Every rank calls it and gets rank 0's fit. `sizes` are payload bytes: the whole buffer of an
    all-reduce, the gathered or the unscattered one of the others. Weighted least squares on relative
    errors, so that small messages count as much as large ones.
    """
    if collective not in _COLLECTIVES:
        raise ValueError(f"cannot measure {collective!r}: choose one of {', '.join(_COLLECTIVES)}")
    times = []
    for nbytes in sizes:
        issue = _COLLECTIVES[collective](nbytes, group)
        issue().wait()
        length = max(3, min(8, max(sizes) // nbytes))
        times.append(statistics.median(train_time_s(issue, length, group) for _ in range(repeats)))
    fitted = torch.tensor(fit(sizes, times), dtype=torch.float64)
    dist.broadcast(fitted, dist.get_global_rank(group, 0) if group else 0, group=group)
    return LinkCost(*fitted.tolist())


def fit(sizes: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """(a, β) minimising the relative squared error of a + β·S, neither below 0. Raises `ValueError` for fewer
    than two sizes."""
    if len(set(sizes)) < 2:
        raise ValueError("two sizes at least are needed to tell latency from rate")
    size, time = np.asarray(sizes, float), np.asarray(times, float)
    design = np.stack((np.ones_like(size), size), axis=1) / time[:, None]
    a, beta = np.linalg.lstsq(design, np.ones_like(time), rcond=None)[0]
    if a < 0:
        return 0.0, float((size / time).sum() / ((size / time) ** 2).sum())
    if beta < 0:
        return float((1 / time).sum() / (1 / time**2).sum()), 0.0
    return float(a), float(beta)
