"""How much communication was hidden, per rank and step, per bucket and per collective.

All sums are integer nanoseconds, ratios come last. What the overlap is worth is in `score`.

Three answers are kept apart everywhere: *no communication happened* (`comm` is 0; `exposed`, `hidden`
and `overlap` are None), *cannot know* (`comm` is None, or it is known and `hidden` is None) and a
measured *0*. Each row says which in its `sentence`.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from course_lib.arrivals import CollectiveRow, late_overall, match
from course_lib.timeline import Span, Timeline, intersect, length, subtract, union

WORK = ("compute", "comm", "copy", "memset")
"""The kinds that run on a device or a wire; the others only annotate."""


@dataclass(frozen=True)
class Row:
    """One step of one rank, or several pooled (then `rank` or `step` is None and times are sums).

    Nanoseconds, or None where the timeline cannot tell: `span` T, `compute` |C|, `comm` |M|, `copy` |P|,
    `memset`, `exposed` |M − C|, `exposed_beyond_copies` |M − C − P|, `hidden` |M ∩ C|, `active` |C ∪ M ∪ P|.
    `cannot_overlap` names the compute lane that carries all of the communication, if one does.
    """

    rank: int | None
    step: int | None
    steps: int
    span: int
    compute: int | None
    comm: int | None
    copy: int
    memset: int
    exposed: int | None
    exposed_beyond_copies: int | None
    hidden: int | None
    active: int
    cannot_overlap: str | None = None

    @property
    def overlap(self) -> float | None:
        """hidden / |M|; None without communication."""
        return self.hidden / self.comm if self.comm and self.hidden is not None else None

    @property
    def share(self) -> float | None:
        """|M| / T, the communication share of the step."""
        return self.comm / self.span if self.comm is not None and self.span else None

    @property
    def busy(self) -> float | None:
        """|C ∪ M ∪ P| / T. A spinning collective is busy too: read it with `compute_busy`."""
        return self.active / self.span if self.compute is not None and self.span else None

    @property
    def compute_busy(self) -> float | None:
        """|C| / T."""
        return self.compute / self.span if self.compute is not None and self.span else None

    @property
    def sentence(self) -> str:
        if self.comm is None:
            return ("Cannot know what communication cost: no communication was recorded where there should be some, "
                    "or no device work at all. Record the devices, or teach the classifier these names.")
        if self.comm == 0:
            return ("No communication happened, so there was nothing to hide." if self.hidden is None else
                    "Communication took no measurable time, so there was nothing to hide.")
        if self.hidden is None:
            return (f"Cannot know how much of {milliseconds(self.comm)} of communication was hidden: no compute was "
                    "recorded beside it.")
        lane = (f" It runs in the compute lane {self.cannot_overlap!r}, where it cannot overlap."
                if self.cannot_overlap else "")
        if self.hidden == 0:
            return f"0 % hidden: all {milliseconds(self.comm)} of communication were exposed.{lane}"
        return (f"{self.hidden / self.comm:.0%} of {milliseconds(self.comm)} of communication were hidden under "
                f"compute, {milliseconds(self.exposed)} exposed.{lane}")


@dataclass(frozen=True)
class BucketRow:
    """The life of one bucket in one step of one rank (`use` counts if it travelled more than once). Times are the
    timeline's nanoseconds; None where not recorded. `queueing` = started − max(launched, full)."""

    rank: int
    step: int
    bucket: int
    use: int
    first_ready: int | None
    full: int | None
    launched: int | None
    started: int | None
    finished: int | None
    bytes: int | None
    exposed: int | None
    queueing: int | None


@dataclass(frozen=True)
class Report:
    """Everything `report` found. `rows` are per rank and step, `ranks` pooled per rank, `pooled` over all.
    `step_times` has one entry a step: the slowest rank's T, in ns. `late` ranks made others wait overall."""

    rows: tuple[Row, ...]
    ranks: tuple[Row, ...]
    pooled: Row
    step_times: tuple[int, ...]
    buckets: tuple[BucketRow, ...]
    collectives: tuple[CollectiveRow, ...]
    late: tuple[int, ...]
    provenance: str

    @property
    def step_time(self) -> float | None:
        """Median over steps of the slowest rank's T, ns."""
        return statistics.median(self.step_times) if self.step_times else None

    @property
    def variation(self) -> float | None:
        """Coefficient of variation of the step time (sample standard deviation / mean); None below two steps."""
        if len(self.step_times) < 2:
            return None
        return statistics.stdev(self.step_times) / statistics.fmean(self.step_times)

    @property
    def wait(self) -> int | None:
        """ns that ranks spent in collectives before the last one arrived, summed over ranks."""
        known = [w for c in self.collectives if c.wait is not None for _, w in c.wait]
        return sum(known) if known else None

    @property
    def at_stake(self) -> int:
        """What better communication could win: ns exposed, all of it where that cannot be known."""
        return self.pooled.exposed if self.pooled.exposed is not None else self.pooled.comm or 0

    @property
    def sentence(self) -> str:
        late = (f" Late: rank {', '.join(map(str, self.late))}." if self.late and (self.wait or 0) > 0.1 * self.at_stake
                else "")
        return self.pooled.sentence + late


def report(timeline: Timeline, *, warmup: int = 0) -> Report:
    """Measure `timeline` after dropping the first `warmup` steps.

    A span belongs to the step whose number it carries, and without a number to the step during which it
    started. A rank without `step` spans is taken as one step, -1. Raises `ValueError` when no step is left
    or a step number occurs twice on a rank."""
    if warmup < 0:
        raise ValueError(f"warmup is {warmup}; give the number of steps to drop, 0 or more")
    rows: list[Row] = []
    buckets: list[BucketRow] = []
    comm: list[Span] = []
    for rank in timeline.ranks:
        spans = timeline.select(rank=rank).spans
        cover = _cover(spans, "compute"), _cover(spans, "copy")
        lanes = {s.lane for s in spans if s.kind == "compute"}
        launches = any(s.kind == "queue" for s in spans)
        for step, window, inside in _windows(spans, warmup):
            rows.append(_row(rank, step, window, inside, cover, lanes))
            buckets += _bucket_rows(rank, step, inside, cover[0], launches)
            comm += (s for s in inside if s.kind == "comm")
    if timeline.ranks and not rows:
        raise ValueError(f"warmup={warmup} drops all {len(timeline.steps)} recorded steps; record more or drop fewer")
    collectives = match(comm)
    slowest: dict[int, int] = defaultdict(int)
    for r in rows:
        slowest[r.step] = max(slowest[r.step], r.span)
    ranks = tuple(_pool([r for r in rows if r.rank == k], k) for k in timeline.ranks)
    return Report(tuple(rows), ranks, _pool(rows, None), tuple(slowest[k] for k in sorted(slowest)), tuple(buckets),
                  collectives, late_overall(collectives), timeline.provenance)


def milliseconds(ns: float) -> str:
    """Three digits that count, and never an exponent: 2250 ms."""
    return np.format_float_positional(ns / 1e6, precision=3, fractional=False, unique=False, trim="-") + " ms"


def _cover(spans: Iterable[Span], *kinds: str) -> np.ndarray:
    """Interval set of all spans of these kinds."""
    return union(np.array([(s.start, s.stop) for s in spans if s.kind in kinds], np.int64).reshape(-1, 2))


def _near(cover: np.ndarray, sets: np.ndarray) -> np.ndarray:
    """The part of `cover` that can touch `sets`: keeps many short steps of a long run linear."""
    if not len(sets):
        return cover[:0]
    return cover[np.searchsorted(cover[:, 1], sets[0, 0]):np.searchsorted(cover[:, 0], sets[-1, 1])]


def _windows(spans: Sequence[Span], warmup: int) -> list[tuple[int, tuple[int, int], list[Span]]]:
    """(step, its host window, its spans) of one rank, after the warm-up."""
    steps = sorted((s for s in spans if s.kind == "step"), key=lambda s: s.step)
    if not steps:
        return [(-1, (min(s.start for s in spans), max(s.stop for s in spans)), list(spans))]
    if any(a.step == b.step for a, b in pairwise(steps)):
        raise ValueError(f"rank {spans[0].rank} has two steps of the same number; number measured steps 0, 1, 2, …")
    inside: dict[int, list[Span]] = {s.step: [] for s in steps}
    by_time = sorted(steps, key=lambda s: s.start)
    begins = [s.start for s in by_time]
    for s in spans:
        step = s.step
        if step < 0 and (k := bisect_right(begins, s.start)) and s.start < by_time[k - 1].stop:
            step = by_time[k - 1].step
        if step in inside:
            inside[step].append(s)
    return [(s.step, (s.start, s.stop), inside[s.step]) for s in steps[warmup:]]


def _row(rank: int, step: int, window: tuple[int, int], spans: list[Span], cover: tuple[np.ndarray, np.ndarray],
         lanes: set[str]) -> Row:
    # An emulated device may date work back to before the step; what is outside T counts for nothing in it.
    work = [s if s.start >= window[0] else s._replace(start=window[0], stop=max(s.stop, window[0]))
            for s in spans if s.kind in WORK]
    wires = {s.lane for s in spans if s.kind == "comm"}
    m = _cover(work, "comm")
    # A step's communication may run under the next step's compute; that hides it just as well.
    c, p = (_near(k, m) for k in cover)
    # Launched but never seen, or nothing seen at all, is not the same as "there was none".
    know_comm = bool(wires) or (bool(work) and not any(s.kind == "queue" for s in spans))
    know_hidden = bool(wires and lanes)
    # Without recorded compute the last device span is not the end of the step; the host's own end stands in.
    stop = max(s.stop for s in work) if work and lanes else window[1]
    return Row(
        rank, step, 1, span=stop - window[0],
        compute=length(_cover(work, "compute")) if lanes else None,
        comm=length(m) if know_comm else None,
        copy=length(_cover(work, "copy")), memset=length(_cover(work, "memset")),
        exposed=length(subtract(m, c)) if know_hidden else None,
        exposed_beyond_copies=length(subtract(subtract(m, c), p)) if know_hidden else None,
        hidden=length(intersect(m, c)) if know_hidden else None,
        active=length(_cover(work, "compute", "comm", "copy")),
        cannot_overlap=", ".join(sorted(wires)) if wires and wires <= lanes else None)


def _pool(rows: Sequence[Row], rank: int | None) -> Row:
    """Sum over the rows that could be measured; rows that cannot know do not count as 0."""
    known = [r for r in rows if r.comm == 0 or r.hidden is not None]
    known = known or [r for r in rows if r.comm is not None] or list(rows)

    def total(field: str) -> int | None:
        values = [v for r in known if (v := getattr(r, field)) is not None]
        return sum(values) if values else None

    lanes = {r.cannot_overlap or "" for r in known if r.comm}
    return Row(rank, None, len(known), total("span") or 0, total("compute"), total("comm"), total("copy") or 0,
               total("memset") or 0, total("exposed"), total("exposed_beyond_copies"), total("hidden"),
               total("active") or 0, ", ".join(sorted(lanes)) if lanes and "" not in lanes else None)


def _bucket_rows(rank: int, step: int, spans: list[Span], compute: np.ndarray, launches: bool) -> list[BucketRow]:
    """A bucket that travels m times in a step (reducing every micro-step) has m fills; each may take several
    collectives (PowerSGD takes two). Where the counts do not divide, one row covers all uses."""
    found: dict[int, dict[str, list[Span]]] = defaultdict(lambda: {"fill": [], "queue": [], "comm": []})
    for s in spans:
        if s.bucket >= 0 and s.kind in ("fill", "queue", "comm"):
            found[s.bucket][s.kind].append(s)
    out = []
    for bucket, kinds in sorted(found.items()):
        fill, comm = kinds["fill"], kinds["comm"]
        uses = len(fill) or len(comm) or 1
        if len(comm) % uses:
            uses = 1
        for k in range(uses):
            share = _share(comm, k, uses)
            out.append(_bucket_row(rank, step, bucket, k, _share(fill, k, uses), share,
                                   _launched(kinds["queue"], share, launches), compute))
    return out


def _share(spans: list[Span], k: int, uses: int) -> list[Span]:
    each = len(spans) // uses
    return spans[k * each:(k + 1) * each]


def _launched(queue: list[Span], comm: list[Span], launches: bool) -> int | None:
    """When the first of these collectives was launched. A wire that records launches (`launches`) leaves out the
    queue of a transfer that started at once."""
    if not comm or not launches:
        return min((q.start for q in queue), default=None)
    begun = {q.stop: q.start for q in queue}
    return min(begun.get(c.start, c.start) for c in comm)


def _bucket_row(rank: int, step: int, bucket: int, use: int, fill: list[Span], comm: list[Span],
                launched: int | None, compute: np.ndarray) -> BucketRow:
    ready = max((s.stop for s in fill), default=None)
    started = min((s.start for s in comm), default=None)
    could = [t for t in (ready, launched) if t is not None]
    m = _cover(comm, "comm")
    sizes = [s.bytes for s in comm if s.bytes >= 0] or [s.bytes for s in fill if s.bytes >= 0]
    return BucketRow(rank, step, bucket, use, min((s.start for s in fill), default=None), ready, launched, started,
                     max((s.stop for s in comm), default=None), sum(sizes) if sizes else None,
                     length(subtract(m, _near(compute, m))) if comm and len(compute) else None,
                     started - max(could) if could and started is not None else None)
