"""What the course calls its own events in a profiler's trace, written and read in one place."""

from __future__ import annotations

import re

EMULATED = "emulated::"
_EMULATED = re.compile(r"emulated::(.+?)(?: ns=(\d+))?$")


def emulated_label(name: str, duration_ns: int) -> str:
    """The label of work on an emulated device. A profiler sees only the host's sleep, which begins late by
    whatever the host was late; with the duration in the label a reader knows when the device began."""
    return f"{EMULATED}{name} ns={duration_ns}"


def emulated_work(label: str, start: int, stop: int) -> tuple[str, int, int] | None:
    """(name, start, stop) on the device, in ns, from an event's label and times; None for another event."""
    if (match := _EMULATED.match(label)) is None:
        return None
    name, duration = match.groups()
    return name, stop - int(duration) if duration else start, stop
