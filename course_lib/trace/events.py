"""Raw events to clean ones: integer nanoseconds, what is broken dropped and counted, the rest sorted by what it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from course_lib.trace.classify import DEVICE, category
from course_lib.trace.note import Note
from course_lib.trace.parse import Document, whole

_TEXTS = {
    "bad-time": "events without a readable ts or dur were left out",
    "negative-duration": "events that end before they start (an end of 0, as a rule) were left out",
    "empty-kernel": "device events at time 0 without duration were left out: the device never reported them",
    "not-an-event": "entries that are no events were left out",
    "begin-end": "begin/end pairs (ph B and E) were left out: the profiler writes complete events",
}


_LIMIT = 2**62
"""Nanoseconds beyond which a time is a mistake (the year 2116): the distance of two would not fit into 64 bits."""

_JITTER = 1_000_000
"""ns by which neighbours in a file may be out of order (a kernel written behind its launch)."""


class Event(NamedTuple):
    """One complete event; `start` and `stop` in nanoseconds on the file's absolute clock."""

    name: str
    category: str
    start: int
    stop: int
    thread: tuple[Any, Any]
    args: dict[str, Any]

    def number(self, *keys: str) -> int | None:
        """The first of these arguments that is a whole number (also written as text), else None."""
        for key in keys:
            value = whole(self.args.get(key))
            if value is not None:
                return value
        return None

    @property
    def correlation(self) -> int | None:
        """What a kernel shares with its launch; tracers write 0 or -1 where they do not know."""
        value = self.args.get("correlation")
        if type(value) is not int:
            value = self.number("correlation", "Correlation ID")
        return value if value is not None and value > 0 else None

    @property
    def external(self) -> int | None:
        return self.number("External id", "external id")


@dataclass
class Events:
    """The events of one file by what they are (`classify.CATEGORIES`)."""

    device: list[Event] = field(default_factory=list)
    runtime: list[Event] = field(default_factory=list)
    operators: list[Event] = field(default_factory=list)
    annotations: list[Event] = field(default_factory=list)
    overhead: list[Event] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    last: int | None = None
    """When the event started that the file ends with, for files that are cut."""
    ordered: bool = True
    """Whether the file has its events in order of time (Kineto writes thread by thread)."""


def nanoseconds(value: Any) -> int | None:
    """Microseconds in a trace (whole, fractional or as text) to whole nanoseconds; None if it is no finite number.

    The fraction is converted apart: an absolute time in microseconds times 1000 does not fit into a double.
    """
    if type(value) is float:
        if not abs(value) < _LIMIT / 1000:
            return None
        full = int(value)
        return full * 1000 + round((value - full) * 1000)
    if type(value) is int:
        return value * 1000 if abs(value) < _LIMIT // 1000 else None
    if isinstance(value, str):
        try:
            exact = Decimal(value)
        except InvalidOperation:
            return None
        return round(exact * 1000) if exact.is_finite() and abs(exact) < _LIMIT // 1000 else None
    return None


def _plain(identity: Any) -> Any:
    return identity if type(identity) in (int, str) else str(identity)


def collect(document: Document) -> Events:
    """Sort out one file. Never raises: what cannot be used is counted in the notes."""
    found, dropped, base = Events(), Counter(), document.base
    into = {"runtime": found.runtime, "operator": found.operators, "annotation": found.annotations,
            "overhead": found.overhead} | dict.fromkeys(DEVICE, found.device)
    for raw in document.events:
        if not isinstance(raw, dict):
            dropped["not-an-event"] += 1
            continue
        if raw.get("ph") != "X":
            dropped["begin-end"] += raw.get("ph") in ("B", "E")
            continue
        cat = raw.get("cat")
        kind = category(cat) if isinstance(cat, str) else ""
        if not kind:
            continue
        start, duration = nanoseconds(raw.get("ts")), nanoseconds(raw.get("dur"))
        if start is None or duration is None or abs(base + start) >= _LIMIT or base + start + duration >= _LIMIT:
            dropped["bad-time"] += 1
        elif duration < 0:
            dropped["negative-duration"] += 1
        elif kind in DEVICE and not start and not duration:
            dropped["empty-kernel"] += 1
        else:
            args = raw.get("args")
            thread = (_plain(raw.get("pid")), _plain(raw.get("tid")))
            into[kind].append(Event(str(raw.get("name", "")), kind, base + start, base + start + duration, thread,
                                    args if isinstance(args, dict) else {}))
            found.ordered &= found.last is None or base + start >= found.last - _JITTER
            found.last = base + start
    found.device.sort(key=lambda e: (e.start, e.stop))
    found.notes += [Note(code, _TEXTS[code], count) for code, count in dropped.items() if count]
    return found
