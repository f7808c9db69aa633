"""Any Chrome traces that PyTorch's profiler wrote -> one `Timeline`, with what is doubtful about it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from course_lib.labels import EMULATED
from course_lib.overlap import WORK, Row, report
from course_lib.timeline import Span, Timeline, intersect, length, union
from course_lib.trace import ranks
from course_lib.trace.classify import launches
from course_lib.trace.device import device_spans, missing_kernels, unseen_collectives
from course_lib.trace.events import Event, Events, collect
from course_lib.trace.facts import Facts
from course_lib.trace.files import sources
from course_lib.trace.host import CpuRule, backward, cpu_spans, emulated_spans, wire_spans
from course_lib.trace.note import Note, TraceError
from course_lib.trace.parse import Document, parse, whole
from course_lib.trace.steps import OUTSIDE, Steps, find_steps, spread

PROVENANCE = {"cuda": "measured (cuda)", "rocm": "measured (rocm)", "xpu": "measured (xpu)", "cpu": "measured (cpu)",
              "emulated": "measured (real wires, emulated device)", "unknown": "measured (no device events)"}


@dataclass(frozen=True)
class RankTrace:
    """One file: its rank, spans, facts for the diagnosis, and notes on what was repaired, dropped or is doubtful."""

    rank: int
    name: str
    timeline: Timeline
    facts: Facts
    notes: tuple[Note, ...]

    def whole(self) -> Row:
        """One row over everything the device did, also outside the steps: from its first to its last span."""
        work = Timeline(tuple(s._replace(step=-1) for s in self.timeline if s.kind in WORK), self.timeline.provenance)
        return report(work).pooled


@dataclass(frozen=True)
class Trace:
    """All files of one run. `timeline` has the spans of all ranks on one clock, beginning at 0."""

    timeline: Timeline
    ranks: tuple[RankTrace, ...]

    @property
    def notes(self) -> tuple[tuple[RankTrace, Note], ...]:
        return tuple((r, note) for r in self.ranks for note in r.notes)


def read(*paths: str | Path, cpu: CpuRule | None = None) -> Timeline:
    """The `Timeline` of trace files: .json, .json.gz, .zip or folders of them, one file a rank.

    `cpu` says which operators are CPU compute (`host.CpuRule`; by default `outer` for traces that the course's own
    capture wrote, `leaf` for all others). Raises `TraceError` with a sentence for what is no Chrome trace.
    """
    return load(*paths, cpu=cpu).timeline


def load(*paths: str | Path, cpu: CpuRule | None = None) -> Trace:
    """Like `read`, with each file's own timeline, facts and notes.

    In a folder or .zip, files that are no Chrome traces are passed over with a note as long as one is.
    """
    documents, refused = [], []
    found = list(sources(*paths))
    with _without_collection():
        for source in found:
            try:
                documents.append(parse(source))
            except TraceError as error:
                if len(found) == 1:
                    raise
                refused.append(error)
        if not documents:
            raise refused[0] if refused else TraceError("no trace was given")
        parts = [_rank(document, *who, cpu) for document, who in zip(documents, ranks.assign(documents))]
    return _together(parts, refused)


def _together(parts: list[RankTrace], refused: list[TraceError]) -> Trace:
    """All files on one clock that begins at 0."""
    parts[0] = replace(parts[0], notes=parts[0].notes + tuple(Note("refused", str(e)) for e in refused))
    origin = min((s.start for p in parts for s in p.timeline), default=0)
    parts = sorted((replace(p, timeline=p.timeline.shifted(origin), facts=_shifted(p.facts, origin)) for p in parts),
                   key=lambda p: p.rank)
    merged = Timeline.merge(p.timeline for p in parts)
    known = [p.timeline.provenance for p in parts if p.facts.device != "unknown"]
    return Trace(replace(merged, provenance=known[0] if known else PROVENANCE["unknown"]), tuple(parts))


@contextmanager
def _without_collection() -> Iterator[None]:
    """Hundreds of thousands of dicts without a cycle: looking for cycles among them doubles the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _rank(document: Document, rank: int, notes: tuple[Note, ...], cpu: CpuRule | None) -> RankTrace:
    events = collect(document)
    steps, about_steps = find_steps(events, document.truncated)
    notes = (*document.notes, *notes, *events.notes, *about_steps)
    spans = [Span(rank, "step", "step", f"step {w.number}", w.start, w.stop, step=w.number) for w in steps.windows]
    during = backward(events)
    facts = Facts(_device(document, events), overhead=_overhead(events.overhead, steps),
                  operators=_count(events.operators, steps), backward_end=_ends(during, steps))
    wire = wire_spans(rank, events)
    facts = replace(facts, parted=bool(wire) and _parted(document))
    if events.device:
        work, launched, (described, comm), more = device_spans(rank, events, steps, during)
        spans += work
        facts = replace(facts, launched=tuple(launched), missing=missing_kernels(events, steps), described=described,
                        collectives=comm)
        if not comm and not wire and _ranks(document) != 1:
            spans += unseen_collectives(rank, events, steps)
    elif facts.device == "emulated":
        spans, more = spans + emulated_spans(rank, events), []
    elif facts.device == "cpu":
        own = any(s.lane == "wire" for s in wire) or any(s.name.startswith("course::") for s in events.annotations)
        rule = cpu or ("outer" if own else "leaf")
        work, more = cpu_spans(rank, events, rule), _bounds(rank, events) if rule == "leaf" else []
        spans += work
    else:
        # The host only launched; that is no measure of what the device did.
        spans, more = spans + unseen_collectives(rank, events, steps), [_nothing(document, events)]
    spans = [_numbered(s, steps) for s in (*spans, *wire)]
    if facts.missing:
        more.append(Note("incomplete-step", f"step {spread(facts.missing)}: kernels were launched and never recorded, "
                         "so its numbers are lower bounds", sum(facts.missing.values())))
    return RankTrace(rank, document.name, Timeline.of(spans, PROVENANCE[facts.device]), facts, (*notes, *more))


def _numbered(span: Span, steps: Steps) -> Span:
    """Work of the host belongs to the step during which it starts; compute that an emulated device dates back to just
    before its step, to the step in which it ends. Device work has its number from its launch already."""
    if span.step >= 0 or not steps.windows:
        return span
    step = steps.at(span.start)
    return span._replace(step=steps.at(span.stop) if step == OUTSIDE and span.kind == "compute" else step)


def _device(document: Document, events: Events) -> str:
    """What the compute of this file ran on."""
    hip = any(e.name.startswith("hip") for e in events.runtime[:1000])
    if events.device:
        xpu = any(e.name.startswith(("urEnqueue", "zeCommand", "piEnqueue")) for e in events.runtime)
        return "rocm" if hip or "roctracer_version" in document.head else "xpu" if xpu else "cuda"
    labels = (*events.annotations, *events.operators)
    if any(e.name.startswith(EMULATED) for e in labels):
        return "emulated"
    # Where a device was driven, operators on the host are launches and not compute.
    driven = (events.runtime or document.head.get("deviceProperties") or document.legacy
              or document.distributed.get("backend") == "nccl" or any(e.name.startswith("nccl:") for e in labels))
    return "unknown" if driven or not labels else "cpu"


def _ranks(document: Document) -> int | None:
    return whole(document.distributed.get("world_size"))


def _parted(document: Document) -> bool:
    """Whether some of the ranks, but more than one, have a group of their own."""
    groups, size = document.distributed.get("pg_config"), _ranks(document)
    sizes = [whole(g.get("pg_size")) for g in groups if isinstance(g, dict)] if isinstance(groups, list) else []
    return size is not None and any(n is not None and 1 < n < size for n in sizes)


def _nothing(document: Document, events: Events) -> Note:
    if document.legacy:
        return Note("no-device-events", "no device events: this old format does not say what ran on the device. "
                                        "Record again with torch.profiler")
    if not (events.operators or events.annotations or events.runtime):
        if events.notes or any(note.code == "lost-events" for note in document.notes):
            return Note("no-events", "no events: those in the file could not be used, as its other notes say")
        return Note("no-events", "no events: only metadata was recorded. The profiler was stopped before an active "
                                 "step (call prof.step() once a step, and more often than wait + warmup)")
    if any(launches(e.name) for e in events.runtime):
        return Note("no-device-events", "no device events: kernels were launched and GPU activity was requested, but "
                                        "none was recorded (the tracer was registered too late, or another profiler "
                                        "held the device)")
    return Note("no-device-events", "no device events were recorded: what `nccl:…` shows on the host is the launch, "
                                    "not the transfer. Profile with ProfilerActivity.CUDA")


def _bounds(rank: int, events: Events) -> list[Note]:
    """Leaf operators are a lower bound of the compute; says by how much, where it matters."""
    least, most = (length(union([(s.start, s.stop) for s in cpu_spans(rank, events, rule)] or [(0, 0)]))
                   for rule in ("leaf", "outer"))
    if most <= 1.1 * least:
        return []
    return [Note("leaf-operators", f"compute is {least / 1e6:.1f} ms by operators that call no other and "
                                   f"{most / 1e6:.1f} ms with all that they call: the overlap lies between the two "
                                   "(cpu=\"outer\" gives the other)")]


def _overhead(events: list[Event], steps: Steps) -> dict[int, int]:
    cover = union([(e.start, e.stop) for e in events])
    found = {w.number: length(intersect(cover, union([(w.start, w.stop)]))) for w in steps.windows} if events else {}
    return {step: ns for step, ns in found.items() if ns}


def _count(events: list[Event], steps: Steps) -> dict[int, int]:
    counts = {w.number: 0 for w in steps.windows}
    for e in events:
        if (step := steps.at(e.start)) in counts:
            counts[step] += 1
    return counts


def _ends(during: list[tuple[int, int]], steps: Steps) -> dict[int, int]:
    ends: dict[int, int] = {}
    for start, stop in during:
        ends[steps.at(start)] = max(stop, ends.get(steps.at(start), stop))
    return ends


def _shifted(facts: Facts, origin: int) -> Facts:
    moved = tuple(k._replace(launch=None if k.launch is None else k.launch - origin, start=k.start - origin,
                             stop=k.stop - origin) for k in facts.launched)
    return replace(facts, launched=moved, backward_end={s: t - origin for s, t in facts.backward_end.items()})
