"""Small traces drawn by chance for exercise 5.2, and what the rules, or wrong ones, make of them.

Times are small whole numbers: everything is counted moment by moment.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Event = tuple[int, str, str, int, int]
Events = list[Event]
Steps = dict[tuple[int, int], tuple[int, int]]

NAMES = ("ncclKernel_AllReduce_RING_LL_Sum_float", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "mscclNcclKernel_1")
STEP = 40


@dataclass(frozen=True)
class Rules:
    """The rules of the exercise; each argument turns one into what people write in its place."""

    itself: bool = False
    labels: Literal["", "compute", "comm", "both"] = ""
    copies: bool = False
    names: Literal["", "ncclKernel", "nccl"] = ""
    other_ranks: bool = False
    cut: bool = False
    own_step: bool = False
    sums: bool = False
    sums_compute: bool = False
    pooled: Literal["", "sum", "mean"] = ""
    none: tuple[float, float] | None = None
    swapped: bool = False


def measured(events: Events, steps: Steps, rules: Rules) -> dict[tuple[int, int], tuple[float, float] | None]:
    """(exposed, hidden) of each (rank, step), or None, under these rules."""
    found = {key: _one(events, key, window, rules) for key, window in steps.items()}
    if rules.pooled:
        for rank in {rank for rank, _ in steps}:
            mine = [found[key] for key in steps if key[0] == rank and found[key] is not None]
            count = len(mine) if rules.pooled == "mean" else 1
            pooled = (sum(x for x, _ in mine) / count, sum(h for _, h in mine) / count) if mine else None
            found |= {key: pooled for key in steps if key[0] == rank}
    return found


def _one(events: Events, key: tuple[int, int], window: tuple[int, int], rules: Rules):
    rank, (begin, end) = key[0], window
    comm, compute = [], set()
    for r, category, name, start, stop in events:
        transfers = _transfers(category, name, rules)
        if transfers and r == rank and begin <= start < end:
            comm.append(set(range(start, min(stop, end) if rules.cut else stop)))
        if ((r == rank or rules.other_ranks) and _computes(category, name, transfers, rules)
                and (not rules.own_step or begin <= start < end)):
            compute |= set(range(start, stop))
    if not comm:
        return rules.none
    if rules.sums:
        total = sum(map(len, comm))
        hidden = sum(len(each & compute) for each in comm)
    else:
        joined = set().union(*comm)
        total, hidden = len(joined), len(joined & compute)
    if rules.sums_compute:
        kernels = [set(range(a, b)) for r, c, name, a, b in events
                   if r == rank and _computes(c, name, _transfers(c, name, rules), rules)]
        hidden = sum(len(each & k) for each in comm for k in kernels)
    return (hidden, total - hidden) if rules.swapped else (total - hidden, hidden)


def _transfers(category: str, name: str, rules: Rules) -> bool:
    if category == "gpu_user_annotation":
        return rules.labels in ("comm", "both") and "nccl" in name.lower()
    if category != "kernel":
        return False
    if rules.names:
        return name.startswith((rules.names, "wire::"))
    return "nccl" in name.lower() or name.startswith("wire::")


def _computes(category: str, name: str, transfers: bool, rules: Rules) -> bool:
    if category == "gpu_user_annotation":
        return rules.labels in ("compute", "both") and not transfers and "nccl" not in name.lower()
    if category == "gpu_memcpy":
        return rules.copies
    return category == "kernel" and (rules.itself or not transfers)


def drawn_events(draw: random.Random, *, copies: bool = False, labels: bool = False, names: bool = False,
                 streams: bool = False, overhang: bool = False, silent: bool = False) -> tuple[Events, Steps]:
    """Two ranks and three steps. Each rank computes at other times, and each step has some exposed and some hidden
    communication, unlike in the steps before it. The arguments add what makes traces hard."""
    events, steps = [], {}
    for rank in (0, 1):
        for step in range(3):
            begin = STEP * step
            steps[rank, step] = (begin, begin + STEP)
            if silent and step == 1:
                events.append((rank, "kernel", "gemm", begin + 2, begin + 9))
                continue
            at = begin + 2 + 14 * rank
            middle = at + draw.randint(6, 8)
            end = middle + draw.randint(2, 4) + step
            name = draw.choice(NAMES) if names else draw.choice(("wire::all_reduce bytes=64", NAMES[1]))
            events += [(rank, "kernel", "gemm", at, middle), (rank, "kernel", name, at + 3 + draw.randint(0, 1), end)]
            if copies:
                events.append((rank, "gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", middle, middle + 1))
            if labels:
                events += [(rank, "gpu_user_annotation", "nccl:all_reduce", at + 2, end + 1),
                           (rank, "gpu_user_annotation", "Optimizer.step", middle, middle + 1)]
            if streams:
                events += [(rank, "kernel", name, end - 1, end + 2), (rank, "kernel", "gemm", at + 3, middle)]
            if overhang:
                late = begin + STEP - 3
                events += [(rank, "kernel", name, late, late + 6), (rank, "kernel", "gemm", late + 4, late + 6)]
    draw.shuffle(events)
    return events, steps
