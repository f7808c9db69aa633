"""Steps drawn by chance for exercise 5.4, and what its rules, or wrong ones, read in them."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

Span = tuple[int, str, int, int]
Spans = list[Span]
Intervals = list[tuple[int, int]]
UNIT = 1000


@dataclass(frozen=True)
class Reading:
    """The rules of the exercise; each argument turns one into what people write in its place."""

    busy: float | None = None
    wait: Literal["last arrival", "first arrival", "none"] = "last arrival"
    order: Literal["", "held first", "wire first"] = ""
    held: Literal["no rank", "not every rank"] = "no rank"
    transfer: Literal["without waiting", "all communication"] = "without waiting"
    other_ranks: bool = False
    ranks: Literal["all", "first"] = "all"
    scale: float = 1


def read_step(spans: Spans, reading: Reading) -> tuple[str, float]:
    """(cause, number) of a step under these rules."""
    if reading.ranks == "first":
        first = min(rank for rank, *_ in spans)
        spans = [span for span in spans if span[0] == first]
    by: dict[int, dict[str, Intervals]] = defaultdict(lambda: defaultdict(list))
    for rank, kind, start, stop in spans:
        by[rank]["comm" if kind == "comm" else "compute"].append((start, stop))
        by[rank][kind + " only"].append((start, stop))
    comm = [by[rank]["comm"] for rank in sorted(by)]
    M, C = (sum(b - a for rank in by.values() for a, b in rank[kind]) for kind in ("comm", "compute"))
    W = sum(_waits(same, reading.wait) for same in zip(*comm))
    T = len(by) * (max(stop for *_, stop in spans) - min(start for _, _, start, _ in spans))
    every = _union([span for rank in by.values() for span in rank["compute"]])
    E = M - sum(_shared(rank["comm"], every if reading.other_ranks else rank["compute"]) for rank in by.values())
    if reading.busy is not None and _busy(by) / T > reading.busy:
        return "nothing to gain", _busy(by) / T
    late = [rank["comm"][0][0] >= max(b for _, b in rank["backward only"]) for rank in by.values() if rank["comm"]]
    held = all(late) if reading.held == "no rank" else any(late)
    carried = M - W if reading.transfer == "without waiting" else M
    rules = [("late rank", W > M / 2, W / M if M else 0), ("held back", held, E / T),
             ("slow wire", carried > C, (M - W) / C if C else 0), ("nothing to gain", True, E / T)]  # fmt: skip
    if reading.order:
        rules.insert(0, rules.pop(1 if reading.order == "held first" else 2))
    cause, _, number = next(rule for rule in rules if rule[1])
    return cause, number * reading.scale


def _waits(same: tuple[tuple[int, int], ...], wait: str) -> int:
    starts = [start for start, _ in same]
    if wait == "none":
        return 0
    return sum(abs((max if wait == "last arrival" else min)(starts) - start) for start in starts)


def _busy(by: dict) -> int:
    return sum(b - a for rank in by.values() for a, b in _union(rank["comm"] + rank["compute"]))


def _shared(spans: Intervals, others: Intervals) -> int:
    return sum(max(0, min(b, d) - max(a, c)) for a, b in spans for c, d in others)


def _union(spans: Intervals) -> Intervals:
    out: Intervals = []
    for start, stop in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out


def drawn_step(draw: random.Random, cause: str) -> Spans:
    """A step of some ranks with this cause. The ranks' compute differs a little, as it does in real jobs; where
    nothing is late they are nearly together. Where "one rank sends late", it is after its backward, and the others have
    begun and wait: with that, but not without, communication takes longer than compute."""
    ranks = draw.randint(3, 4)
    late = set(draw.sample(range(ranks), 1)) if cause.startswith("late") else set()
    buckets, forward, backward = draw.randint(3, 5), draw.randint(20, 30), draw.randint(60, 90)
    whole = {"late rank": 0.2, "held back": draw.uniform(0.4, 0.9), "slow wire": draw.uniform(1.6, 2.5),
             "nothing to gain": 0.4, "late and held back": 0.3, "held back, slow wire": 1.5,
             "one rank sends late": 0.85}[cause]  # fmt: skip
    each = round(whole * (forward + backward) * UNIT / buckets)
    extra = {rank: (forward + backward) * draw.uniform(1.2, 1.5) if rank in late else draw.uniform(0, 3)
             for rank in range(ranks)}  # fmt: skip
    alone = draw.randrange(ranks) if cause == "one rank sends late" else None
    out: Spans = []
    free = 0
    begin = {rank: round(extra[rank] * UNIT) for rank in range(ranks)}
    middle = {rank: begin[rank] + forward * UNIT for rank in range(ranks)}
    end = {rank: middle[rank] + backward * UNIT for rank in range(ranks)}
    issue: dict[int, int] = {}
    transfers: Spans = []
    for k in range(buckets):
        for rank in range(ranks):
            part = 1.0 if "held back" in cause or rank == alone else (k + 1) / buckets
            ready = round(middle[rank] + part * (end[rank] - middle[rank]))
            issue[rank] = max(ready, free)
        free = max(issue.values()) + each
        transfers += [(rank, "comm", issue[rank], free) for rank in range(ranks)]
    for rank in range(ranks):
        out += [(rank, "forward", begin[rank], middle[rank]), (rank, "backward", middle[rank], end[rank])]
    return out + transfers
