"""From a `Timeline` to what is drawn of it: two lanes a rank, bars with a look, and the header's numbers.

Both the figure and the widget draw a `Scene`, so they cannot disagree about what is exposed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from course_lib.timeline import Span, Timeline, intersect, length, subtract, union

COMPUTE_LANE = ("compute", "copy", "memset")
MAX_TRACKS = 4

_BACKWARD = re.compile(r"backward|\bbwd\b|^[BIW]\d*\b", re.IGNORECASE)
_OPTIMIZER = re.compile(r"optim|\bstep\b|adam|sgd|update", re.IGNORECASE)


class Piece(NamedTuple):
    """A part of a bar with one look. Nanoseconds after the start of the step."""

    look: str
    start: int
    stop: int


class Bar(NamedTuple):
    """One span as drawn. Spans that overlap inside a lane share it: bar in `track` of the row's `tracks`."""

    name: str
    start: int
    stop: int
    bytes: int
    bucket: int
    track: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Row:
    """One lane of one rank. `backward` is when the rank's backward ended, or None when names do not tell."""

    rank: int
    role: str
    tracks: int
    stop: int
    backward: int | None
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Scene:
    """A step, ready to draw. Times in nanoseconds after its start; sums are means over the ranks.

    `exposed_ns` and `share` are None when there is no communication span: that is not the same as 0.
    """

    rows: tuple[Row, ...]
    step_ns: int
    exposed_ns: float | None
    share: float | None
    step: int | None
    provenance: str

    @property
    def looks(self) -> set[str]:
        return {p.look for row in self.rows for bar in row.bars for p in bar.pieces}


def typical_step(timeline: Timeline) -> int | None:
    """The step whose time (slowest rank) is the median of all steps, or None when no step is marked."""
    slowest: dict[int, int] = defaultdict(int)
    for s in timeline:
        if s.kind == "step":
            slowest[s.step] = max(slowest[s.step], s.stop - s.start)
    order = sorted(slowest, key=lambda step: (slowest[step], step))
    return order[(len(order) - 1) // 2] if order else None


def scene(timeline: Timeline, step: int | None = None) -> Scene:
    """What is drawn of one step (the typical one by default; everything when no step is marked).

    Raises `ValueError` when the step asked for is not in the timeline.
    """
    if step is not None and step not in timeline.steps:
        raise ValueError(f"step {step} is not in this timeline; it has {timeline.steps or 'no marked steps'}")
    step = typical_step(timeline) if step is None else step
    spans, windows = _of_step(timeline, step)
    origin = min((w[0] for w in windows.values()), default=0)
    arrivals = _last_arrivals(spans)
    rows: list[Row] = []
    sums = np.zeros(3)
    for rank in sorted(windows):
        mine = [s for s in spans if s.rank == rank]
        compute = union(_times(s for s in mine if s.kind == "compute"))
        comm = union(_times(s for s in mine if s.kind == "comm"))
        sums += (length(comm), length(subtract(comm, compute)), windows[rank][1] - windows[rank][0])
        end, stop = backward_end(mine), windows[rank][1] - origin
        end = None if end is None else end - origin
        rows.append(_row(rank, "compute", stop, end, [(s, _plain(s)) for s in mine if s.kind in COMPUTE_LANE], origin))
        wire = [(s, _wire_pieces(s, compute, arrivals)) for s in mine if s.kind == "comm"]
        rows.append(_row(rank, "wire", stop, end, wire, origin))
    has_comm = any(s.kind == "comm" for s in spans)
    step_ns = max((stop - start for start, stop in windows.values()), default=0)
    return Scene(tuple(rows), step_ns, sums[1] / len(windows) if has_comm else None,
                 sums[0] / sums[2] if has_comm and sums[2] else None, step, timeline.provenance)


def backward_end(spans: Iterable[Span]) -> int | None:
    """When the last backward span ends, by name; else the last compute that is not the optimizer's."""
    compute = [s for s in spans if s.kind == "compute"]
    named = [s for s in compute if _BACKWARD.search(s.name)]
    rest = named or [s for s in compute if not _OPTIMIZER.search(s.name)]
    return max((s.stop for s in rest), default=None)


def same_on_every_rank(scene: Scene) -> bool:
    """True when all ranks draw the same bars: a symmetric prediction needs to be drawn only once."""
    seen: dict[str, set] = defaultdict(set)
    for row in scene.rows:
        seen[row.role].add((row.stop, row.bars))
    return all(len(rows) == 1 for rows in seen.values())


def _of_step(timeline: Timeline, step: int | None) -> tuple[list[Span], dict[int, tuple[int, int]]]:
    """Spans of the step and its window per rank. Spans without a step number belong by their time."""
    windows = {s.rank: (s.start, s.stop) for s in timeline if s.kind == "step" and s.step == step}
    drawn = [s for s in timeline if s.kind == "comm" or s.kind in COMPUTE_LANE]
    if step is not None:
        def belongs(s: Span) -> bool:
            low, high = windows.get(s.rank, (0, -1))
            return s.step == step or (s.step < 0 and s.stop > low and s.start < high)
        drawn = [s for s in drawn if belongs(s)]
    for rank in {s.rank for s in drawn} - set(windows):
        times = _times(s for s in drawn if s.rank == rank)
        windows[rank] = (int(times[:, 0].min()), int(times[:, 1].max()))
    return drawn, windows


def _times(spans: Iterable[Span]) -> np.ndarray:
    return np.array([(s.start, s.stop) for s in spans], np.int64).reshape(-1, 2)


def _plain(span: Span) -> tuple[Piece, ...]:
    return (Piece(span.kind, span.start, span.stop),)


def _last_arrivals(spans: list[Span]) -> dict[Span, int]:
    """When the last rank entered the collective that each communication span is part of.

    The k-th span of one step, name and bucket on each rank is taken for the same collective.
    """
    seen: dict[tuple, int] = defaultdict(int)
    groups: dict[tuple, list[Span]] = defaultdict(list)
    for s in spans:
        if s.kind == "comm":
            key = (s.rank, s.step, s.name, s.bucket)
            groups[(s.step, s.name, s.bucket, seen[key])].append(s)
            seen[key] += 1
    return {s: max(p.start for p in group) for group in groups.values() for s in group if len(group) > 1}


def _wire_pieces(span: Span, compute: np.ndarray, arrivals: dict[Span, int]) -> tuple[Piece, ...]:
    """Hidden and exposed parts of a communication span and, over them, the part spent waiting."""
    near = compute[np.searchsorted(compute[:, 1], span.start, "right"):np.searchsorted(compute[:, 0], span.stop)]
    whole = np.array([(span.start, span.stop)], np.int64)
    parts = [Piece("hidden", *iv) for iv in intersect(whole, near).tolist()]
    parts += [Piece("exposed", *iv) for iv in subtract(whole, near).tolist()]
    parts.sort(key=lambda p: p.start)
    arrival = min(arrivals.get(span, span.start), span.stop)
    # A hundredth of the span is jitter between clocks and threads, not a late rank.
    if arrival - span.start > (span.stop - span.start) // 100:
        parts.append(Piece("wait", span.start, arrival))
    return tuple(parts)


def _row(rank: int, role: str, stop: int, backward: int | None, spans: list[tuple[Span, tuple[Piece, ...]]],
         origin: int) -> Row:
    """Lay spans into as few tracks as keep overlapping ones apart (at most `MAX_TRACKS`)."""
    free: list[int] = []
    bars = []
    for s, pieces in spans:
        track = next((i for i, until in enumerate(free) if until <= s.start), len(free))
        if track == len(free) and len(free) < MAX_TRACKS:
            free.append(s.stop)
        else:
            track = min(track, MAX_TRACKS - 1)
            free[track] = max(free[track], s.stop)
        moved = tuple(Piece(p.look, p.start - origin, p.stop - origin) for p in pieces)
        bars.append(Bar(s.name, s.start - origin, s.stop - origin, s.bytes, s.bucket, track, moved))
    return Row(rank, role, max(1, len(free)), stop, backward, tuple(bars))
