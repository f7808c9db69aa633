"""Time several ways of doing the same step, in alternation, so that a drifting machine treats all alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from course_lib.launch import control_group
from course_lib.record import Recorder, now, recording
from course_lib.timeline import Timeline


class Step(NamedTuple):
    """`run` is timed; `prepare` (zeroing gradients, say) is done before the clock starts."""

    run: Callable[[], None]
    prepare: Callable[[], None] = lambda: None


def alternate(steps: Mapping[str, Step], repeats: int, warmup: int = 2,
              provenance: str = "measured (cpu)") -> tuple[dict[str, list[float]], dict[str, Timeline]]:
    """Run every step `repeats` times, one of each in turn, on all ranks of a run.

    Returns seconds of each repetition (from the moment all ranks are ready to the end on the slowest)
    and this rank's timeline with one `step` span a repetition. `warmup` rounds are neither timed nor
    recorded: buckets are rebuilt and connections made there. Each round starts with another step, so
    that none always follows the same one. Collective call.
    """
    control, names = control_group(), list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    recorders: dict[str, Recorder] = {name: Recorder(dist.get_rank(), provenance) for name in names}
    for round_ in range(warmup + repeats):
        shift = round_ % len(names)
        for name in names[shift:] + names[:shift]:
            steps[name].prepare()
            dist.barrier(control)
            if round_ < warmup:
                steps[name].run()
                continue
            begin = now()
            with recording(into=recorders[name]) as rec, rec.measure_step(round_ - warmup):
                steps[name].run()
            took = torch.tensor([(now() - begin) * 1e-9], dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX, group=control)
            seconds[name].append(float(took))
    return seconds, {name: rec.timeline() for name, rec in recorders.items()}
