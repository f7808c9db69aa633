"""The rules of `diagnose`: each looks at one cause and stays silent when its evidence is thin."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby

import numpy as np

from course_lib.overlap import Report
from course_lib.overlap import milliseconds as _ms
from course_lib.timeline import Span, length
from course_lib.trace.classify import collective
from course_lib.trace.facts import Launched
from course_lib.trace.finding import Finding
from course_lib.trace.measure import waits
from course_lib.trace.reader import RankTrace, Trace
from course_lib.trace.tail import merged, moves, tail_of

ENVIRONMENT = ("CUDA_DEVICE_MAX_CONNECTIONS=1", "TORCH_NCCL_ENABLE_TIMING=1", "TORCH_NCCL_BLOCKING_WAIT=1",
               "CUDA_LAUNCH_BLOCKING=1")
"""Settings that are known to make launched communication wait."""
OPERATOR_NS = 4_000
"""What the profiler adds to one operator, about (pytorch#82793)."""
CLOCK_NS = 1_000_000
"""What clocks may differ by before it is said."""
JOINT = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "barrier")
"""Collectives that end nowhere before every rank has come to them."""


def no_device_events(trace: Trace, found: Report) -> Iterator[Finding]:
    for r in trace.ranks:
        for note in r.notes:
            if note.code in ("no-device-events", "no-events"):
                yield Finding(note.code, f"Cannot know what rank {r.rank} did: {note.text}.", f"{r.name} holds "
                              f"{sum(r.facts.operators.values())} host operators in steps and no device event.",
                              "Record again with ProfilerActivity.CPU and ProfilerActivity.CUDA, and call prof.step() "
                              "after every step.", (r.rank,))


def same_stream(trace: Trace, found: Report) -> Iterator[Finding]:
    rows = [r for r in found.rows if r.cannot_overlap and r.comm]
    if rows:
        yield Finding(
            "same-stream", "Communication runs on the compute stream, where it cannot overlap.",
            f"All communication is on {rows[0].cannot_overlap}, as compute is: {_ms(sum(r.comm for r in rows))} in "
            f"{len(rows)} steps.", "Issue the collective with async_op=True on a stream of its own, or choose a kernel "
            "that leaves the compute stream (custom and multimem all-reduces do not).",
            tuple(sorted({r.rank for r in rows})), sum(r.exposed or 0 for r in rows))


def wire_bound(trace: Trace, found: Report) -> Iterator[Finding]:
    """More communication than there is compute to hide it, or a wire that is behind when backward ends: no order and no
    bucket helps."""
    rows, waited, moved = [r for r in found.rows if r.comm and r.hidden is not None], waits(found), 0
    transfers: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for s in trace.timeline:
        if moves(s):
            transfers[s.rank, s.step].append(s)
    wait = transfer = 0
    for r in rows:
        mine = waited.get((r.rank, r.step), (0, 0))
        wait, transfer = wait + mine[0], transfer + mine[1]
        moved += max(min(length(merged(transfers[r.rank, r.step])), r.comm) - mine[0], 0)
    span, compute, exposed = (sum(getattr(r, field) for r in rows) for field in ("span", "compute", "exposed"))
    if not exposed:
        return
    tail = tail_of(trace, found)
    bare = f"{_ms(exposed)} are exposed, {exposed / span:.0%} of the steps"
    if moved > compute and exposed > 0.1 * span:
        says = "The wire is the wall: communication takes longer than the compute that could hide it."
        less = f" without {_ms(wait)} of waiting for late ranks" * bool(wait)
        evidence = f"Communication takes {_ms(moved)}{less}, compute {_ms(compute)}; {bare}."
    elif tail.backlog and tail.after >= 0.02 * span:
        says = "The wire is the wall: when backward ends, it is still behind."
        evidence = (f"{_ms(tail.after)} of communication lie behind the end of backward, and all but "
                    f"{_ms(tail.after - tail.queued)} of it before the last large transfer begins; {bare}.")
    else:
        return
    if transfer < 0.5 * moved:
        evidence += " Most of it could not be matched across ranks, so waiting for a late one may be in it."
    yield Finding("wire-bound", says, evidence, "Send fewer bytes (compression, a lower precision), make an update of "
                  "more micro-steps (larger N), or take a faster wire. Other buckets or another order cannot hide what "
                  "has no compute beside it.", tuple(sorted({r.rank for r in rows if r.exposed})),
                  max(exposed - wait, 0))


def after_backward(trace: Trace, found: Report) -> Iterator[Finding]:
    """Communication that only runs when the backward pass is over has nothing left to hide under."""
    tail = tail_of(trace, found)
    if not tail.total or tail.after < 0.5 * tail.exposed or tail.after < 0.02 * found.pooled.span:
        return
    if tail.first <= tail.total // 10:
        says, do = (("Most communication" if tail.first else "Communication") + " starts only after the end of "
                    "backward.",
                    "Look for what holds it back: gradients reduced after the loop, no_sync() around the last "
                    "micro-step, a device synchronisation or copy before the reduction, one bucket as large as the "
                    "model, buckets filled in another order than the gradients become ready.")
    elif tail.backlog:
        return  # `wire_bound` says so: the last bucket is not what it waits for
    else:
        rest = tail.exposed - tail.after
        says, do = ("The last communication of the step runs after the end of backward.",
                    "Make the last bucket smaller (the last bucket can never hide behind its own backward), or send "
                    "less there; " + (
                        "what runs before is hidden already." if rest <= 0.1 * tail.before else
                        f"{_ms(rest)} of {_ms(tail.before)} before that end are exposed as well, with no compute "
                        "recorded beside them: look there for a blocking wait, a late rank, gaps between operators."))
    yield Finding("after-backward", says, f"{_ms(tail.after)} of {_ms(tail.exposed)} exposed communication lie "
                  f"behind the end of backward; {tail.first} of {tail.total} transfers started before it.", do,
                  tail.ranks, tail.after)


def early_late(trace: Trace, found: Report) -> Iterator[Finding]:
    """Launched long before, inputs ready, stream free, and still not started."""
    late, behind, where, comm, mixed = 0, 0, set(), 0, set()
    for r in trace.ranks:
        for kernel, ready, free, blocker in _starts(r.facts.launched):
            comm += kernel.stop - kernel.start
            delay = kernel.start - max(kernel.launch, ready, free)
            if delay > 100_000:
                late += delay
                where.add(r.rank)
            if free > max(kernel.launch, ready) and blocker and collective(blocker) != collective(kernel.name):
                behind += free - max(kernel.launch, ready)
                mixed.add(f"{collective(kernel.name)} behind {collective(blocker)}")
    if late > max(0.1 * comm, 1_000_000):
        yield Finding(
            "launched-early-started-late", "Communication was launched early and started late.",
            f"After launch, with its inputs ready and its stream free, it waited {_ms(late)} (communication itself "
            f"took {_ms(comm)}).", f"Check the environment for {', '.join(ENVIRONMENT)}; give communication a stream "
            "of high priority; see whether compute kernels fill the device so that it cannot be scheduled.",
            tuple(sorted(where)), late)
    if behind > max(0.1 * comm, 1_000_000):
        yield Finding(
            "communication-queue", "Different collectives wait for each other on one stream.",
            f"{'; '.join(sorted(mixed))}: {_ms(behind)} in the queue.", "Give them process groups of their own (one "
            "communicator is one queue), or issue the one that is needed first first.", cost=behind)


def late_rank(trace: Trace, found: Report) -> Iterator[Finding]:
    total = waits(found)
    wait, transfer = (sum(part) for part in zip(*total.values())) if total else (0, 0)
    # What could not be matched counts too, so that a long wait in a few short collectives is no cause.
    if found.late and wait > 0.1 * max(transfer, found.at_stake):
        names = ", ".join(map(str, found.late))
        who = f"Rank {names} is late" if len(found.late) == 1 else f"Ranks {names} are late"
        others = [row for row in found.rows if row.rank not in found.late]
        waited = sum(total.get((row.rank, row.step), (0, 0))[0] for row in others)
        most = (": most of what looks like communication on the others is waiting."
                if waited > sum(row.comm or 0 for row in others) / 2 else ".")
        yield Finding(
            "late-rank", who + most,
            f"Ranks waited {_ms(wait)} and transferred {_ms(transfer)} ({wait / (wait + transfer):.0%} waiting).",
            "A faster wire or smaller buckets do not shorten this wait. Compare what the late ranks do before the "
            "collective: data loading, uneven shapes, host gaps, another job on the node.", found.late, wait)


def clocks(trace: Trace, found: Report) -> Iterator[Finding]:
    # A device kernel ends when all are done. gloo and the course's wire let a rank go when its own part is, on a ring
    # steadily sooner than its neighbour; but not before all have come.
    on_devices = all(r.facts.on_device for r in trace.ranks)
    if any(r.facts.parted for r in trace.ranks):
        return
    groups: dict[tuple[int, str], dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for s in trace.timeline:
        kind = collective(s.name)
        if s.kind == "comm" and (kind not in ("broadcast", "send/recv") if on_devices else kind in JOINT):
            groups[s.step, s.name][s.rank].append(s)
    same = [spans for ranks in groups.values() if len(ranks) > 1 and len({len(v) for v in ranks.values()}) == 1
            for spans in zip(*ranks.values())]
    apart = [max(s.stop if on_devices else s.start for s in spans) - min(s.stop for s in spans) for spans in same]
    apart = [ns for ns in apart if ns > CLOCK_NS]
    if apart:
        how = "more than 1 ms apart on different ranks" if on_devices else "on a rank before another has come to them"
        yield Finding(
            "clocks", "The ranks' clocks disagree, or these collectives do not belong together.",
            f"{len(apart)} of {len(same)} collectives end {how}, {_ms(max(apart))} at most.",
            "Take wait and transfer across ranks with care; on several hosts synchronise the clocks (PTP or chrony) "
            "before profiling.")


def host_gap(trace: Trace, found: Report) -> Iterator[Finding]:
    """The device had nothing to do because the host had not launched anything."""
    each = {r.rank: _gaps(r, found) for r in trace.ranks if r.facts.launched}
    gaps, ranks = sum(each.values()), {rank for rank, gap in each.items() if gap}
    span = sum(row.span for row in found.rows if row.rank in each)
    if span and gaps > 0.1 * span:
        yield Finding(
            "host-gap", "The device waits for the host to launch work.",
            f"{_ms(gaps)} ({gaps / span:.0%} of the steps) the device was idle until the next launch.",
            "Look at the host there: data loading (workers, pinned memory, non_blocking copies), .item() or print of a "
            "loss, many tiny kernels (torch.compile, CUDA graphs, fused optimizer), the profiler itself.",
            tuple(sorted(ranks)), gaps)


def profiler_overhead(trace: Trace, found: Report) -> Iterator[Finding]:
    span = count = added = recorded = 0
    for r in trace.ranks:
        steps = {row.step: row.span for row in found.rows if row.rank == r.rank}
        operators = sum(n for step, n in r.facts.operators.items() if step in steps)
        count, span = count + operators, span + sum(steps.values())
        recorded += sum(ns for step, ns in r.facts.overhead.items() if step in steps)
        # A slower host only matters as far as the device waits for it.
        added += min(OPERATOR_NS * operators, _gaps(r, found)) if r.facts.launched else OPERATOR_NS * operators
    if span and (recorded > 0.05 * span or added > 0.1 * span):
        yield Finding(
            "profiler-overhead", "The profiler itself takes part of the step.",
            f"About {added / span:.0%}, for {count} recorded operators at some {OPERATOR_NS / 1000:.0f} us each; "
            f"{_ms(recorded)} of its own work were recorded.", "Measure the step without profiler and give it as "
            "--unprofiled-ms; record without stacks and shapes.", cost=max(recorded, added))


ALL = (no_device_events, same_stream, wire_bound, after_backward, early_late, late_rank, clocks, host_gap,
       profiler_overhead)


def _gaps(r: RankTrace, found: Report) -> int:
    """ns in the steps during which the device was idle and what came next was not launched yet."""
    steps, idle = {row.step for row in found.rows if row.rank == r.rank}, 0
    for step, kernels in groupby(sorted(r.facts.launched, key=lambda k: (k.step, k.start)), key=lambda k: k.step):
        reach = None
        for k in kernels if step in steps else ():
            if reach is not None and k.launch is not None and k.launch > reach:
                idle += k.start - reach
            reach = k.stop if reach is None else max(reach, k.stop)
    return idle


def _starts(launched: tuple[Launched, ...]) -> Iterator[tuple[Launched, int, int, str]]:
    """Every communication kernel with a known launch: when its inputs were ready (the end of the compute launched
    before it), when its stream became free, and what was on that stream before."""
    compute = sorted((k.launch, k.stop) for k in launched if k.kind == "compute" and k.launch is not None)
    times = [launch for launch, _ in compute]
    reach = np.maximum.accumulate([stop for _, stop in compute]) if compute else np.zeros(0, np.int64)
    free: dict[str, tuple[int, str]] = {}
    for k in launched:
        if k.kind == "comm" and k.launch is not None:
            before = int(np.searchsorted(times, k.launch))
            ready = int(reach[before - 1]) if before else k.launch
            yield k, ready, *free.get(k.lane, (k.launch, ""))
        if k.kind == "comm":
            free[k.lane] = (k.stop, k.name)
