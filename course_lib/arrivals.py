"""A collective seen from all ranks: how long each waited for the last to arrive, and what the wire took.

In real jobs most of "communication" is often waiting for late ranks; a faster wire does not help there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from course_lib.timeline import Span


@dataclass(frozen=True)
class CollectiveRow:
    """One collective seen from every rank, matched by order within (step, bucket, name); `bucket` is -1 where
    the spans have none, and groups that work side by side need names of their own. `wait` pairs each rank
    with last arrival − own start, in ns; `transfer` is what the wire itself took. Both are None when they
    cannot be known: one rank only, ranks that issued different numbers, point-to-point. `late` names the
    ranks the others waited for."""

    step: int
    bucket: int
    sequence: int
    name: str
    wait: tuple[tuple[int, int], ...] | None
    transfer: int | None
    late: tuple[int, ...]


def match(comm: Iterable[Span]) -> tuple[CollectiveRow, ...]:
    """Match by order: every rank issues the collectives of one group in the same order."""
    groups: dict[tuple[int, int, str], dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for s in comm:
        groups[s.step, s.bucket, s.name][s.rank].append(s)
    out = []
    for (step, bucket, name), ranks in sorted(groups.items()):
        counts = [len(spans) for spans in ranks.values()]
        alone = len(ranks) < 2 or min(counts) < max(counts) or _point_to_point(name)
        for k in range(max(counts)):
            out.append(CollectiveRow(step, bucket, k, name, None, None, ()) if alone else
                       _collective(k, [spans[k] for spans in ranks.values()]))
    return tuple(out)


def _collective(sequence: int, spans: list[Span]) -> CollectiveRow:
    last = max(s.start for s in spans)
    wait = {s.rank: last - s.start for s in spans}
    # A root's end only means "handed over"; the last receiver has it.
    transfer = (max(s.stop for s in spans) - last if _rooted(spans[0].name) else
                min(s.stop - s.start for s in spans))
    return CollectiveRow(spans[0].step, spans[0].bucket, sequence, spans[0].name, tuple(wait.items()), transfer,
                         _late(wait, transfer))


def _point_to_point(name: str) -> bool:
    return any(word in name.lower() for word in ("send", "recv", "p2p"))


def _rooted(name: str) -> bool:
    bare = name.lower().replace("_", "").replace("-", "")
    return "broadcast" in bare or ("reduce" in bare and "allreduce" not in bare and "scatter" not in bare)


def _late(wait: dict[int, int], transfer: int) -> tuple[int, ...]:
    """Ranks in the later half of the arrivals' range, when the longest wait is over a tenth of the transfer
    (below that it is jitter)."""
    longest = max(wait.values())
    return tuple(r for r, w in sorted(wait.items()) if w < longest / 2) if longest > transfer / 10 else ()


def late_overall(collectives: Iterable[CollectiveRow]) -> tuple[int, ...]:
    total: dict[int, int] = defaultdict(int)
    moved = 0
    for c in collectives:
        if c.wait is not None:
            moved += c.transfer
            for rank, w in c.wait:
                total[rank] += w
    return _late(total, moved) if total else ()
