"""What a message between two neighbours of a pipeline costs, measured while every rank is busy."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist

from course_lib import record
from course_lib.launch.measure import fit
from course_lib.link_cost import LinkCost
from course_lib.schedule.action import Action, Op
from course_lib.schedule.clock import Clock
from course_lib.schedule.emulated import EmulatedStage
from course_lib.train.emulated import device


def measure_message(sizes: Sequence[int] = (2**12, 2**16, 2**18), busy_ms: float = 10.0, turns: int = 8,
                    repeats: int = 3, group: dist.ProcessGroup | None = None) -> LinkCost:
    """Fit latency (seconds) and seconds per byte of one message. Every rank of `group` calls it and gets the same.

    Neighbours play a message of `sizes` bytes to and fro, all pairs at once; who has it computes `busy_ms` on the
    emulated device before it sends it back, as a stage does. One way is half a round less the compute, so that no
    two clocks are compared. It holds what a pipeline pays from the end of the compute on one rank to its begin on
    the next: handing over, the wire, and waking up. Raises `ValueError` for a single rank.
    """
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    if len(ranks) < 2:
        raise ValueError("one rank sends no messages; measure on two at least")
    me, times = ranks.index(dist.get_rank()), []
    for size in sizes:
        rounds = []
        for k in range(2 * repeats):  # pairs 0-1, 2-3, … and 1-2, 3-4, … in turn
            serves = me % 2 == k % 2
            peer = me + 1 if serves else me - 1
            plays = 0 <= peer < len(ranks) and (len(ranks) > 2 or k % 2 == 0)
            dist.barrier(group)
            took = _rally(ranks[peer], serves, size, turns, busy_ms, group) if plays else 0.0
            sums = torch.tensor([took if serves else 0.0, float(plays and serves)], dtype=torch.float64)
            dist.all_reduce(sums, group=group)
            if sums[1]:
                rounds.append(float(sums[0] / sums[1]))
        times.append(statistics.median(rounds))
    return LinkCost(*fit(sizes, times))


def _rally(peer: int, serves: bool, size: int, turns: int, busy_ms: float, group: dist.ProcessGroup | None) -> float:
    """Seconds of one way, as the rank that serves sees them."""
    ball, stage, clock = torch.zeros(max(1, size // 4)), EmulatedStage(busy_ms, 0, 0), Clock(torch.device("cpu"))
    stroke = Action(Op.F, 0)

    def hit() -> None:
        with clock.action(stroke, "measure"):
            output = stage(ball)
        dist.isend(output.detach(), peer, group=group).wait()

    clock.begin()
    start = device.busy_until
    for _ in range(turns):
        if serves:
            hit()
        clock.wait(dist.irecv(ball, peer, group=group))
        if not serves:
            hit()
    return ((record.now() - start) / turns / 1e9 - 2 * busy_ms / 1e3) / 2
