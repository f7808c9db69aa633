"""Bytes to events: the fast way for good files, repairs for bad ones, a sentence for what is no Chrome trace."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

from course_lib.trace.files import Source
from course_lib.trace.note import Note, TraceError
from course_lib.trace.repair import repair

_OTHERS = (
    (("nodes", "schema"), "a PyTorch execution trace (ExecutionTraceObserver)"),
    (("workload_graph",), "a Chakra execution trace"),
    (("nodes",), "a graph of nodes, perhaps an execution trace"),
    (("cells", "nbformat"), "a notebook"),
)

_WHOLE = re.compile(r"-?[0-9]{1,30}")
# An absolute time with a fraction has more digits than a double keeps; as text it stays exact.
_LONG_TIME = re.compile(rb'("ts"\s*:\s*)(\d{14,}\.\d+)')


@dataclass(frozen=True)
class Document:
    """The raw events of one file and what stands around them. `legacy` files are a bare list, as the autograd
    profiler wrote before Kineto."""

    name: str
    events: list[Any]
    head: dict[str, Any]
    notes: tuple[Note, ...]
    legacy: bool = False

    @property
    def truncated(self) -> bool:
        """Whether events were lost at its end. A cut .gz whose events are all there has lost none."""
        return any(note.code == "truncated" for note in self.notes)

    @property
    def base(self) -> int:
        """What every `ts` is relative to, in nanoseconds; 0 where `ts` is absolute."""
        return whole(self.head.get("baseTimeNanoseconds")) or 0

    @property
    def distributed(self) -> dict[str, Any]:
        info = self.head.get("distributedInfo")
        return info if isinstance(info, dict) else {}


def parse(source: Source) -> Document:
    """Read one file. Raises `TraceError` when it could not be unpacked, is empty, not JSON or not a Chrome trace."""
    if source.fault:
        raise TraceError(f"{source.name} {source.fault}")
    if not source.raw.strip():
        raise TraceError(f"{source.name} is empty: the profiler wrote nothing (was prof.step() called often enough for "
                         "the schedule to reach its active steps?)")
    notes = list(source.notes)
    raw = _LONG_TIME.sub(rb'\1"\2"', source.raw) if _LONG_TIME.search(source.raw, 0, 1 << 20) else source.raw
    try:
        found = orjson.loads(raw)
    except ValueError:
        found, more = repair(raw)
        notes += more
    if isinstance(found, list):
        if found and not any(isinstance(e, dict) and "ph" in e for e in found):
            raise TraceError(f"{source.name} is a JSON list, but not of trace events (none has a \"ph\")")
        note = Note("legacy", "a bare list of events, as the autograd profiler wrote before Kineto: it does not say "
                              "what ran on the device")
        return Document(source.name, found, {}, (*notes, note), legacy=not any(
            isinstance(e, dict) and e.get("cat") for e in found))
    if not isinstance(found, dict):
        raise TraceError(f"{source.name} is not JSON, so no Chrome trace")
    events = found.get("traceEvents")
    if not isinstance(events, list):
        raise TraceError(f"{source.name} is {_what(found)}, not a Chrome trace: it has no list \"traceEvents\". Write "
                         "one with prof.export_chrome_trace(path).")
    del found["traceEvents"]
    return Document(source.name, events, found, tuple(notes))


def _what(found: dict[str, Any]) -> str:
    for keys, words in _OTHERS:
        if all(key in found for key in keys):
            return words
    return f"a JSON object with {', '.join(sorted(map(str, found))[:5]) or 'nothing in it'}"


def whole(value: Any) -> int | None:
    """A whole number, also one that is written as text or as a float; None for anything else."""
    if type(value) is int:
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(value)
    return None
