"""Exercise 5.2: exposed and hidden communication, per rank and step, from the events of a trace.

The learner writes `exposed_hidden(events, steps)`:

- `events` lists (rank, category, name, start, stop) of all ranks, in no particular order, in nanoseconds.
- Device work has the category `kernel`. It is communication if its name contains `nccl`, in any case, or begins with
  `wire::`; else it is compute. All other categories are neither: copies, and labels that a profiler puts beside work.
- `steps` maps (rank, step) to its (start, stop). A communication belongs to the step in which it starts, with all of
  its time. It is hidden where the *same rank* computes, whatever step that compute belongs to.
- The result maps each (rank, step) to (exposed, hidden) in nanoseconds, or to None if the step has no communication.

The check counts moment by moment.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from course_lib.lab.exercises.lab05.traces_drawn import Events, Rules, Steps, drawn_events, measured
from course_lib.lab.guard import call
from course_lib.lab.model import Row, Verdict, exercise

HINTS = (
    "Take one (rank, step) at a time. Which events are its communication? Which compute can hide it? Only kernels of "
    "this rank come into question.",
    "Join the communication with your `union`, and the compute too. The total of the joined communication, minus what "
    "it shares with the joined compute, is exposed. Two intervals share max(0, min(stops) - max(starts)).",
    "comm = union([(a, b) for r, c, name, a, b in events if r == rank and c == 'kernel' and is_comm(name) and begin <= "
    "a < end]); compute likewise with `not is_comm(name)` and without the step; hidden = sum(max(0, min(b, d) - "
    "max(a, c)) for a, b in comm for c, d in compute); None if comm is empty.",
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end?",
    "hides_itself": "Your compute contains the communication kernels, so communication hides under itself, and nearly "
    "all of it looks hidden. Compute is the kernels that are *not* communication.",
    "annotations_as_kernels": "You count labels as work. `gpu_user_annotation` only describes: it repeats each "
    "collective, and spans whole phases in which the device may be idle. Take the category `kernel` alone.",
    "memcpy_as_compute": "You count copies as compute. A copy engine computes nothing, so a transfer beside a copy is "
    "still exposed. (What a copy hides is reported apart.)",
    "old_names": "You know only some names of NCCL's kernels. `ncclKernel_…` became `ncclDevKernel_…`, and others "
    "prefix or capitalise it: look for `nccl` anywhere in the name, in any case.",
    "pooled_over_steps": "Each step of a rank has the same numbers in your answer: those of all its steps together, or "
    "their mean. One bad step among good ones then cannot be seen. Keep the steps apart.",
    "other_ranks": "The compute of another rank does not hide this rank's communication: this one waits all the same. "
    "Compare spans of one rank only.",
    "sums": "Where two transfers or two kernels run at the same time, you count the moment twice. Join the spans "
    "first.",
    "cut_at_the_step": "You cut a transfer at the end of its step. It belongs to the step in which it starts, with all "
    "of its time: what overhangs is exposed, or hides under the next step's compute.",
    "own_step_only": "A transfer that overhangs its step may hide under the next step's compute. Compare it with all "
    "compute of its rank.",
    "zero_for_none": "A step without communication has no exposed time: return None for it. 0 would say that there was "
    "communication and all of it was hidden.",
    "swapped": "Your numbers are right and the other way round: (exposed, hidden) is asked for.",
}

VARIANTS: dict[str, tuple[Rules, ...]] = {
    "hides_itself": (Rules(itself=True),),
    "annotations_as_kernels": (Rules(labels="compute"), Rules(labels="comm"), Rules(labels="both"),
                               Rules(labels="both", copies=True)),
    "memcpy_as_compute": (Rules(copies=True),),
    "old_names": (Rules(names="ncclKernel"), Rules(names="nccl")),
    "other_ranks": (Rules(other_ranks=True),),
    "cut_at_the_step": (Rules(cut=True), Rules(cut=True, own_step=True)),
    "own_step_only": (Rules(own_step=True),),
    "sums": (Rules(sums=True), Rules(sums=True, sums_compute=True)),
    "pooled_over_steps": (Rules(pooled="sum"), Rules(pooled="mean")),
    "zero_for_none": (Rules(none=(0, 0)),),
    "swapped": (Rules(swapped=True),),
}


@exercise("5.2", title="exposed and hidden, per step", minutes=12, needs="exposed_hidden", hints=HINTS,
          mistakes=MISTAKES)  # fmt: skip
def exposed_and_hidden(answer: Callable[[Events, Steps], dict], draw: random.Random) -> Verdict:
    """Rows for the example of the text, then for one feature of traces each, then for all together."""
    example = ([(0, "kernel", "gemm", 0, 10), (0, "kernel", "ncclDevKernel_AllReduce", 6, 14),
                (0, "gpu_memcpy", "Memcpy DtoH", 10, 12)], {(0, 0): (0, 15)})  # fmt: skip
    sets = {
        "plain": [drawn_events(draw) for _ in range(4)],
        "copies": [drawn_events(draw, copies=True) for _ in range(4)],
        "labels": [drawn_events(draw, labels=True) for _ in range(4)],
        "names": [drawn_events(draw, names=True) for _ in range(4)],
        "streams": [drawn_events(draw, streams=True) for _ in range(4)],
        "overhang": [drawn_events(draw, overhang=True) for _ in range(4)],
        "silent": [drawn_events(draw, silent=True), ([], {(0, 0): (0, 9)}), ([], {})],
        "all": [drawn_events(draw, copies=True, labels=True, names=True, streams=True, overhang=True, silent=True)
                for _ in range(6)],
    }  # fmt: skip
    played: dict[str, list[tuple[Events, Steps, dict]]] = {}
    for kind, cases in {"example": [example], **sets}.items():
        played[kind] = []
        for events, steps in cases:
            shown = f"exposed_hidden({events if len(events) < 4 else f'{len(events)} events'}, {steps})"
            got = call(answer, list(events), dict(steps), shown=shown)
            if got is None:
                row = Row("returns the figures", False, "a dictionary by (rank, step)", f"{shown} gave None")
                return Verdict((row,), "no_result")
            if fault := _form(got, steps, shown):
                return Verdict((fault,))
            played[kind].append((events, steps, {key: _plain(got[key]) for key in steps}))
    names = (
        ("example", "the example of the text", "{(0, 0): (4, 4)}"),
        ("plain", "steps of two ranks", "each rank and step by itself"),
        ("copies", "copies beside transfers", "a copy hides nothing"),
        ("labels", "labels beside the work", "a label is not work"),
        ("names", "old and new names of NCCL's kernels", "all are communication"),
        ("streams", "several streams at once", "each moment once"),
        ("overhang", "transfers that overhang their step", "they belong where they start"),
        ("silent", "steps without communication", "None, and not 0"),
        ("all", "everything together", "the rules above"),
    )
    rows = tuple(_row(name, expected, played[kind]) for kind, name, expected in names)
    every = [one for some in played.values() for one in some]
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(every))


def _mistake(played: list[tuple[Events, Steps, dict]]) -> str:
    for mistake, variants in VARIANTS.items():
        if any(all(got == measured(events, steps, rules) for events, steps, got in played) for rules in variants):
            return mistake
    return ""


def _form(got: Any, steps: Steps, shown: str) -> Row | None:
    """What is wrong with the form of an answer."""
    expected = "for instance {(0, 0): (4, 4), (0, 1): None}"
    if not isinstance(got, dict):
        return Row("returns a dictionary", False, expected, f"{shown} gave {got!r}")
    if set(got) != set(steps):
        return Row("has each (rank, step) once", False, str(sorted(steps)), f"{shown} has {sorted(map(str, got))}")
    for key, value in got.items():
        try:
            _plain(value)
        except (TypeError, ValueError):
            return Row("gives (exposed, hidden) or None", False, expected, f"{shown} has {value!r} for {key}")
    return None


def _plain(value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    exposed, hidden = value
    return float(exposed), float(hidden)


def _row(name: str, expected: str, played: list[tuple[Events, Steps, dict]]) -> Row:
    """The smallest case that breaks the rules is shown, with the events of one rank and step."""
    for events, steps, got in sorted(played, key=lambda case: len(case[0])):
        right = measured(events, steps, Rules())
        for key in steps:
            if got[key] != right[key]:
                mine = [event for event in events if event[0] == key[0]]
                return Row(name, False, expected, f"rank {key[0]}, step {key[1]} at {steps[key]}: gave "
                           f"{_said(got[key])}, right is {_said(right[key])}. Events of this rank: {mine}")
    return Row(name, True, expected, f"held in {len(played)} of {len(played)} traces")


def _said(value: tuple[float, float] | None) -> str:
    return "None" if value is None else f"({value[0]:g}, {value[1]:g})"
