"""Host events to spans, for ranks that compute on the CPU or an emulated device, and for gloo on any device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from course_lib.labels import emulated_work
from course_lib.timeline import Span, union
from course_lib.trace.classify import dispatches, host_communication, step_number, wire_transfer
from course_lib.trace.collectives import element_size
from course_lib.trace.events import Event, Events

CpuRule = Literal["leaf", "outer"]
"""Which operators count as CPU compute: `leaf` those that call no other; `outer` every
operator that itself computes with all that it calls, as the course's own live capture does. A matrix product calls a
few bookkeeping operators (`aten::resolve_conj`), so `leaf` leaves it out and is the lower bound of the compute."""

_OPERATORS = ("aten::", "mkldnn::", "quantized::", "torch::")
_BACKWARD = "autograd::engine::evaluate_function"


def wire_spans(rank: int, events: Events) -> list[Span]:
    """Transfers that the host itself reports: the course's Wire, else gloo's and MPI's spans, on their own lanes."""
    labels = (*events.annotations, *events.operators)
    own = [(e, w) for e in labels if (w := wire_transfer(e.name))]
    if own:
        # The Wire moves its bytes through gloo: its own span is the whole transfer, with latency and pace.
        return [Span(rank, "comm", "wire", op, e.start, e.stop, size, bucket) for e, (op, size, bucket) in own]
    moved = [e for e in labels if host_communication(e.name)]
    # Threads are numbered in order, so that the same worker has the same lane on every rank and in every run.
    workers = sorted({e.thread for e in moved}, key=str)
    return [Span(rank, "comm", f"{e.name.split(':')[0]} {workers.index(e.thread)}", e.name, e.start, e.stop, _bytes(e))
            for e in sorted(moved, key=lambda e: e.start)]


def emulated_spans(rank: int, events: Events) -> list[Span]:
    """What an emulated device reports of itself; it is all the compute there is."""
    found = (emulated_work(e.name, e.start, e.stop) for e in (*events.annotations, *events.operators))
    spans, reached = [], -2**63
    for name, start, stop in sorted((work for work in found if work is not None), key=lambda work: work[2]):
        # A host that woke up late reports the end late; the device had begun its next work already, and does one at a
        # time.
        spans.append(Span(rank, "compute", "device", name, min(max(start, reached), stop), stop))
        reached = stop
    return spans


def cpu_spans(rank: int, events: Events, rule: CpuRule) -> list[Span]:
    """Compute on the CPU, by operators, on every thread that moves no bytes; on one that also runs the steps (a
    pipeline receives there), while it moves none."""
    labels = (*events.annotations, *events.operators)
    moving: dict[object, list[tuple[int, int]]] = defaultdict(list)
    for e in labels:
        if host_communication(e.name) or wire_transfer(e.name):
            moving[e.thread].append((e.start, e.stop))
    steps = {e.thread for e in labels if step_number(e.name) is not None} & set(moving)
    busy = {thread: union(moving[thread]) for thread in steps}

    def computes(e: Event) -> bool:
        if e.thread not in busy:
            return e.thread not in moving
        k = int(np.searchsorted(busy[e.thread][:, 0], e.start, "right"))
        return not k or e.start >= busy[e.thread][k - 1, 1]

    mine = sorted(filter(computes, events.operators), key=lambda e: (str(e.thread), e.start, -e.stop))
    chosen = _leaves(mine) if rule == "leaf" else _outer(mine)
    return [Span(rank, "compute", "compute", e.name, e.start, e.stop) for e in chosen if not dispatches(e.name)]


def backward(events: Events) -> list[tuple[int, int]]:
    """When the backward pass ran on the host: disjoint (start, stop), sorted, nanoseconds."""
    out: list[tuple[int, int]] = []
    for e in sorted((e for e in events.operators if e.name.startswith(_BACKWARD)), key=lambda e: e.start):
        if out and e.start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], e.stop))
        else:
            out.append((e.start, e.stop))
    return out


def _leaves(events: Sequence[Event]) -> Iterator[Event]:
    """Events in which no other of the same thread begins."""
    for event, following in zip(events, [*events[1:], None]):
        if following is None or following.thread != event.thread or following.start >= event.stop:
            yield event


def _outer(events: Iterable[Event]) -> Iterator[Event]:
    """Computing operators that are in no other: those they call add nothing to the union. What encloses them
    (autograd nodes, the dispatch of a collective) may merely wait."""
    reached: dict[object, int] = {}
    for event in events:
        if event.name.startswith(_OPERATORS) and event.stop > reached.get(event.thread, -2**63):
            reached[event.thread] = event.stop
            yield event


def _bytes(event: Event) -> int:
    """From the shapes, if they were recorded; -1 else."""
    shapes, types = event.args.get("Input Dims"), event.args.get("Input type")
    if not (isinstance(shapes, list) and isinstance(types, list) and shapes and types):
        return -1
    size, count = element_size(types[0]), 1
    if size is None or not isinstance(shapes[0], list) or not shapes[0]:
        return -1
    for n in shapes[0]:
        if not isinstance(n, int):
            return -1
        count *= n
    return count * size
