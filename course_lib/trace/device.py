"""Device events to spans: kernels, copies and memsets, in the step whose host code launched them."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict

from course_lib.timeline import Span
from course_lib.trace.classify import device_kind, dispatches, launches, launches_graph, peer_copy
from course_lib.trace.collectives import Collective, Under, attribute
from course_lib.trace.events import Event, Events
from course_lib.trace.facts import Launched
from course_lib.trace.note import Note
from course_lib.trace.steps import OUTSIDE, Steps

TOLERANCE = 1_000
"""ns by which kernels on one stream may seem to overlap: older files count in whole microseconds."""
EARLIEST = -50_000
"""ns from launch to start that still is clock drift between host and device, not a wrong link."""


def device_spans(rank: int, events: Events, steps: Steps, backward: list[tuple[int, int]]
                 ) -> tuple[list[Span], list[Launched], tuple[int, int], list[Note]]:
    """The spans of one file's device events, their launches, how many collectives were (described, seen) and notes.

    A kernel whose launch was not recorded counts by its own start, unless it was launched before the recording
    (its correlation is lower than all recorded ones): then it belongs to no step.
    """
    launched = _launches(events.runtime)
    calls = [e for e in events.operators if e.name == "record_param_comms"]
    under = Under((*events.operators, *events.annotations))
    kinds = [_kind(e, launched, under) for e in events.device]
    comm = iter(attribute([e for e, k in zip(events.device, kinds) if k == "comm"], launched, calls))
    first = min(launched, default=0)
    devices = {str(e.args["device"]) for e in events.device if "device" in e.args}
    several = len(devices) > 1
    spans: list[Span] = []
    seen: list[Launched] = []
    about: Counter[str] = Counter(devices=len(devices) * several)
    for event, kind in zip(events.device, kinds):
        launch = launched.get(event.correlation) if event.correlation is not None else None
        step = _step(event, launch, steps, first, about)
        what = next(comm) if kind == "comm" else Collective(event.name, event.number("bytes") or -1)
        about["comm"] += kind == "comm"
        about["described"] += what.known
        about["peer-copy"] += kind == "copy" and peer_copy(event.name)
        lane = _lane(event, several)
        spans.append(Span(rank, kind, lane, what.name, event.start, event.stop, what.bytes, -1, step))
        at = launch.start if launch else None
        seen.append(Launched(what.name, kind, lane, at, event.start, event.stop, step,
                             at is not None and _inside(backward, at)))
        if at is not None and event.start - at < EARLIEST:
            about["early"] += 1
        if kind == "comm" and at is not None and event.start > at:
            spans.append(Span(rank, "queue", "launch", what.name, at, event.start, what.bytes, -1, step))
    about["overlaps"] = _overlaps(spans)
    return spans, seen, (about["described"], about["comm"]), _notes(about)


def missing_kernels(events: Events, steps: Steps) -> dict[int, int]:
    """Per step, how many kernel launches have no kernel: the step is incomplete."""
    seen = {e.correlation for e in events.device}
    lost = Counter(steps.at(e.start) for e in events.runtime
                   if launches(e.name) and e.correlation is not None and e.correlation not in seen)
    lost.pop(OUTSIDE, None)
    return dict(lost)


def unseen_collectives(rank: int, events: Events, steps: Steps) -> list[Span]:
    """A `queue` span for every collective that was launched where no communication kernel was ever recorded, so that
    no number takes "not seen" for "none happened"."""
    return [Span(rank, "queue", "launch", e.name, e.start, e.stop, -1, -1, steps.at(e.start))
            for e in events.annotations if dispatches(e.name) and ":" in e.name]


def _launches(runtime: list[Event]) -> dict[int, Event]:
    """By correlation. Any runtime call may be the launch; one that is called a launch wins over others."""
    found: dict[int, Event] = {}
    for event in runtime:
        key = event.correlation
        if key is not None and (key not in found or (launches(event.name) and not launches(found[key].name))):
            found[key] = event
    return found


def _kind(event: Event, launched: dict[int, Event], under: Under) -> str:
    kind = device_kind(event.category, event.name)
    if kind == "copy" and peer_copy(event.name) and event.correlation in launched:
        # Collectives by copy engine are memcpys to a peer; whoever issued them makes the difference.
        return "comm" if under(launched[event.correlation].start) else kind
    return kind


def _step(event: Event, launch: Event | None, steps: Steps, first: int, about: Counter[str]) -> int:
    if not steps.windows:
        return -1
    if launch is not None and not launches_graph(launch.name):
        step = steps.at(launch.start)
        about["outside"] += step == OUTSIDE
        return step
    if launch is not None:
        about["graph"] += 1
        return steps.at(event.start)
    if event.correlation is not None and event.correlation < first:
        about["foreign"] += 1
        return OUTSIDE
    about["unlinked"] += 1
    return steps.at(event.start)


def _lane(event: Event, several: bool) -> str:
    stream = event.args.get("stream", event.thread[1])
    lane = stream if isinstance(stream, str) and stream.startswith("stream") else f"stream {stream}"
    return f"device {event.args.get('device', event.thread[0])} {lane}" if several else lane


def _inside(intervals: list[tuple[int, int]], time: int) -> bool:
    k = bisect_right(intervals, (time, 2**63))
    return bool(k) and time < intervals[k - 1][1]


def _overlaps(spans: list[Span]) -> int:
    reach: dict[str, int] = defaultdict(lambda: -2**63)
    count = 0
    for s in spans:
        if s.kind != "queue":
            count += s.start < reach[s.lane] - TOLERANCE
            reach[s.lane] = max(reach[s.lane], s.stop)
    return count


def _notes(about: Counter[str]) -> list[Note]:
    texts = {
        "foreign": "device events were launched before the recording began (warm-up): no step counts them",
        "outside": "device events were launched between or outside the steps: no step counts them",
        "unlinked": "device events have no recorded launch: they count in the step during which they started",
        "graph": "device events come from a graph launch: they count in the step during which they started",
        "early": "device events start over 50 us before their launch: the clocks of host and device disagree",
        "devices": "devices in one file count as one rank: compute on one hides communication on another",
        "overlaps": "device events overlap others on the same stream: unions count them once, sums would not",
        "peer-copy": "copies to another device came from no collective: possible communication, counted as copies",
    }
    notes = [Note(code, text, about[code]) for code, text in texts.items() if about[code]]
    if about["described"] < about["comm"]:
        notes.append(Note("undescribed", f"{about['described'] / about['comm']:.0%} of the communication kernels are "
                                         "described (group, type, bytes); the others go by their names",
                          about["comm"] - about["described"]))
    return notes
