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

from course_lib.overlap import Report, report
from course_lib.timeline import Span, Timeline, intersect, subtract, union

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
    """A step, ready to draw. Times in nanoseconds after its start; `exposed_ns` is the mean over the ranks.

    `exposed_ns` and `share` are None when they cannot be known, and `exposed_ns` also when nothing was
    sent (`silent`): neither is the same as 0.
    """

    rows: tuple[Row, ...]
    step_ns: int
    exposed_ns: float | None
    share: float | None
    silent: bool
    step: int | None
    provenance: str

    @property
    def looks(self) -> set[str]:
        return {p.look for row in self.rows for bar in row.bars for p in bar.pieces}


def typical_step(found: Report) -> int | None:
    """The step whose time (slowest rank) is the median of all steps, or None when no step is marked."""
    slowest: dict[int, int] = defaultdict(int)
    for r in found.rows:
        if r.step is not None and r.step >= 0:
            slowest[r.step] = max(slowest[r.step], r.span)
    order = sorted(slowest, key=lambda step: (slowest[step], step))
    return order[(len(order) - 1) // 2] if order else None


def scene(timeline: Timeline, step: int | None = None) -> Scene:
    """What is drawn of one step (the typical one by default; everything when no step is marked).

    The numbers are those of `overlap.report`. Raises `ValueError` when the step asked for is not there.
    """
    if step is not None and step not in timeline.steps:
        raise ValueError(f"step {step} is not in this timeline; it has {timeline.steps or 'no marked steps'}")
    found = report(timeline)
    step = typical_step(found) if step is None else step
    measured = {r.rank: r for r in found.rows if r.step == (-1 if step is None else step)}
    work = [s for s in timeline if s.rank in measured and (s.kind == "comm" or s.kind in COMPUTE_LANE)]
    marks = {s.rank: s.start for s in timeline if s.kind == "step" and s.step == step}
    mine = {rank: [s for s in work if s.rank == rank and (step is None or s.step == step)] for rank in measured}
    starts = {rank: marks.get(rank, min((s.start for s in mine[rank]), default=0)) for rank in measured}
    origin = min(starts.values(), default=0)
    waits = _waits(found)
    rows: list[Row] = []
    for rank, spans in sorted(mine.items()):
        cover = union(_times(s for s in work if s.rank == rank and s.kind == "compute"))
        end, stop = backward_end(spans), starts[rank] + measured[rank].span - origin
        end = None if end is None else end - origin
        compute = [(s, (Piece(s.kind, s.start, s.stop),)) for s in spans if s.kind in COMPUTE_LANE]
        rows.append(_row(rank, "compute", stop, end, compute, origin))
        rows.append(_row(rank, "wire", stop, end, _wire_bars(spans, cover, waits), origin))
    known = [r for r in measured.values() if r.comm is not None]
    exposed = [r.exposed for r in known if r.exposed is not None]
    span = sum(r.span for r in known)
    return Scene(tuple(rows), max((r.span for r in measured.values()), default=0),
                 sum(exposed) / len(exposed) if exposed else None, sum(r.comm for r in known) / span if span else None,
                 bool(known) and not any(r.comm for r in known), step, timeline.provenance)


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


def coarse(pieces: Iterable[Piece], pixel: float) -> list[Piece]:
    """The pieces of one track as far as a screen can show them: a trace may have more kernels than pixels.

    What shares a pixel becomes one piece with the look of most of it. So a transfer under a train of short
    kernels stays hidden communication, although each gap between two kernels exposes a sliver of it.
    """
    out: list[Piece] = []
    blur: list[Piece] = []

    def settle() -> None:
        if blur:
            sums: dict[str, int] = defaultdict(int)
            for p in blur:
                sums[p.look] += p.stop - p.start
            _join(out, Piece(max(sums, key=sums.__getitem__), blur[0].start, max(p.stop for p in blur)), pixel)
            blur.clear()

    for p in pieces:
        if blur and (p.start - blur[-1].stop > pixel / 2 or p.stop - p.start >= pixel):
            settle()
        if p.stop - p.start >= pixel:
            _join(out, p, pixel)
        else:
            blur.append(p)
            if p.stop - blur[0].start >= pixel:
                settle()
    settle()
    return out


def _join(out: list[Piece], piece: Piece, pixel: float) -> None:
    """Append, or lengthen the last piece when both look the same, nearly touch and one of them is small."""
    if out and out[-1].look == piece.look and piece.start - out[-1].stop < pixel / 2 and min(
            piece.stop - piece.start, out[-1].stop - out[-1].start) < 2 * pixel:
        piece = Piece(piece.look, out[-1].start, max(piece.stop, out.pop().stop))
    out.append(piece)


def _times(spans: Iterable[Span]) -> np.ndarray:
    return np.array([(s.start, s.stop) for s in spans], np.int64).reshape(-1, 2)


def _waits(found: Report) -> dict[tuple[int, int, int, str, int], int]:
    """Nanoseconds that a rank's k-th collective of a step, bucket and name waited for the last rank."""
    return {(rank, c.step, c.bucket, c.name, c.sequence): wait
            for c in found.collectives for rank, wait in c.wait or ()}


def _wire_bars(spans: list[Span], compute: np.ndarray, waits: dict) -> list[tuple[Span, tuple[Piece, ...]]]:
    uses: dict[tuple[int, int, str], int] = defaultdict(int)
    bars = []
    for s in (s for s in spans if s.kind == "comm"):
        use = uses[s.step, s.bucket, s.name]
        uses[s.step, s.bucket, s.name] += 1
        bars.append((s, _wire_pieces(s, compute, waits.get((s.rank, s.step, s.bucket, s.name, use), 0))))
    return bars


def _wire_pieces(span: Span, compute: np.ndarray, wait: int) -> tuple[Piece, ...]:
    """Hidden and exposed parts of a communication span and, over them, the part spent waiting."""
    near = compute[np.searchsorted(compute[:, 1], span.start, "right"):np.searchsorted(compute[:, 0], span.stop)]
    whole = np.array([(span.start, span.stop)], np.int64)
    parts = [Piece("hidden", *iv) for iv in intersect(whole, near).tolist()]
    parts += [Piece("exposed", *iv) for iv in subtract(whole, near).tolist()]
    parts.sort(key=lambda p: p.start)
    # A hundredth of the span is jitter between clocks and threads, not a late rank.
    if wait > (span.stop - span.start) // 100:
        parts.append(Piece("wait", span.start, min(span.start + wait, span.stop)))
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
