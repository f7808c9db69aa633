"""What costs time in a trace, with the evidence and what to do next: small rules, one question each."""

from __future__ import annotations

from collections.abc import Iterator

from course_lib.overlap import Report
from course_lib.trace import rules
from course_lib.trace.finding import Finding
from course_lib.trace.measure import measure
from course_lib.trace.reader import Trace


def diagnose(trace: Trace, found: Report | None = None, *, unprofiled_ms: float | None = None) -> tuple[Finding, ...]:
    """All findings, those that say "cannot know" first, then the dearest first.

    `found` are the numbers to judge (default: all steps); `unprofiled_ms` is the step time without a profiler, if it
    was measured, in milliseconds: a profile that is over 10 % slower describes another program.
    """
    found = found or measure(trace)
    out = [f for rule in rules.ALL for f in rule(trace, found)]
    if unprofiled_ms is not None and found.step_time:
        out += _slowed(found.step_time, unprofiled_ms * 1e6)
    return tuple(sorted(out, key=lambda f: (f.cost is not None, -(f.cost or 0))))


def _slowed(profiled: float, plain: float) -> Iterator[Finding]:
    if profiled > 1.1 * plain:
        yield Finding(
            "profiler-overhead", f"The profiled step is {profiled / plain - 1:.0%} slower than without profiler.",
            f"{profiled / 1e6:.1f} ms profiled, {plain / 1e6:.1f} ms without.",
            "Record without stacks, shapes and memory, or profile only CUDA activity; trust the order of events more "
            "than their lengths.", cost=int(profiled - plain))
