"""Exercise 4.2: launch a bucket when it is full.

The learner writes one method of this class; the cell of the exercise gives the rest:

    class Reducer:
        def __init__(self, buckets, uses, wire):
            self.buckets = buckets                # [[id, …], …] in the order in which they are sent
            self.uses_left = dict(uses)           # id -> how many more times the hook is called for it
            self.grads_left = [len(bucket) for bucket in buckets]
            self.bucket_of = {index: b for b, bucket in enumerate(buckets) for index in bucket}
            self.next_bucket = 0
            self.wire = wire                      # wire.launch(b) starts bucket b and returns a handle at once
            self.handles = []

        def on_gradient_ready(self, index):
            ...

`uses` is 1 for nearly every parameter. It is 2 for one whose hook runs twice before its gradient is
complete: a tied weight inside re-entrant checkpoints, or any weight over two micro-steps. The check makes
its own `Reducer(buckets, uses, wire)` on a fake wire and calls `on_gradient_ready`. It looks at what reaches the
wire, and that `handles` has what `launch` returned; the other attributes may be changed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from course_lib.lab.exercises.lab04.fake_wire import FakeWire, FakeWork
from course_lib.lab.guard import Broke, call
from course_lib.lab.model import Row, Verdict, exercise

HINTS = (
    "The hook only counts and launches. Count down what is left: first the uses of this parameter, then, when it has "
    "none left, the gradients of its bucket.",
    "A full bucket may leave only if all buckets before it have left. `self.next_bucket` says whose turn it is. One "
    "call can free several buckets at once, so ask again after each launch. Keep the handles; the waiting comes in "
    "exercise 4.3.",
    "self.uses_left[index] -= 1; return if that is not 0. Then self.grads_left[self.bucket_of[index]] -= 1. Then: "
    "while self.next_bucket < len(self.buckets) and self.grads_left[self.next_bucket] == 0: append "
    "self.wire.launch(self.next_bucket) to self.handles and add 1 to self.next_bucket.",
)

MISTAKES = {
    "waits_at_once": "Your hook waits for a bucket. Backward cannot go on while its hook waits, so nothing overlaps. "
    "Keep the handle and leave; the waiting belongs after backward.",
    "once_per_use": "You count a parameter as ready each time its hook is called. One that is used twice is complete "
    "at the last call only: until then a part of its gradient is missing, and your bucket leaves without it.",
    "arrival_order": "You launch a bucket whenever it is full. Which one is full first can differ between ranks, and "
    "collectives are matched by their order: one rank would add its bucket 1 to another's bucket 0, or hang. Launch in "
    "the order of the list, so that a full bucket waits for its turn.",
    "never_launches": "Nothing was launched. Does your hook call `self.wire.launch(bucket)` when the count of a bucket "
    "has come down to 0?",
    "one_per_call": "Your hook launches at most one bucket in a call. When bucket 0 fills last, several full buckets "
    "are behind it, and all of them may leave in that call. Ask again after each launch.",
    "stays_at_the_first": "Only bucket 0 is ever launched. When it has left it is the next one's turn: add 1 to "
    "`self.next_bucket`.",
    "launches_late": "Your buckets leave later than they could. The call that completes a bucket whose turn it is "
    "should launch it itself: each later call is time that the wire stands still.",
    "drops_the_handles": "You launch buckets and do not keep what `launch` returns. The handle is all there is to wait "
    "on: without it, 4.3 cannot know when a bucket has arrived, and would use gradients that are still on the wire. "
    "Append every handle to `self.handles`.",
}


class Case(NamedTuple):
    """One backward pass on one rank: the calls of the hook in order, the wire that saw what they did, and the buckets
    whose handles are in `handles` afterwards."""

    buckets: list[list[int]]
    uses: dict[int, int]
    calls: list[int]
    wire: FakeWire
    kept: list[int]

    def full_at(self) -> list[int]:
        """For each bucket the number of the call that completes it."""
        last = {index: number for number, index in enumerate(self.calls)}
        return [max(last[index] for index in bucket) for bucket in self.buckets]

    def due_at(self) -> list[int]:
        """For each bucket the call in which it should leave: full, and all before it too."""
        full = self.full_at()
        return [max(full[: b + 1]) for b in range(len(full))]

    def order(self) -> list[int]:
        return [event.bucket for event in self.wire.launches()]

    def tied(self) -> bool:
        return max(self.uses.values()) > 1

    def __str__(self) -> str:
        twice = [index for index, uses in self.uses.items() if uses > 1]
        extra = f" ({twice[0]} is used twice)" if twice else ""
        left = [f"{event.bucket} in call {event.during + 1}" for event in self.wire.launches()]
        return (f"buckets {self.buckets}{extra}, hook called for {self.calls}: launched {', '.join(left) or 'nothing'}"
                f"; self.handles has {len(self.kept)} of {len(left)} handles")


@exercise("4.2", title="launch when full", minutes=15, needs="Reducer", hints=HINTS, mistakes=MISTAKES, kind="class")
def launch_when_full(answer: type, draw: random.Random) -> Verdict:
    """Rows over some forty backward passes whose gradients arrive in orders drawn by chance."""
    cases = [_played(answer, *_pass(draw, tied, shuffled)) for tied, shuffled in
             [(False, False), (False, True), (True, False), (True, True)] for _ in range(10)]  # fmt: skip
    if not any(c.order() for c in cases):
        row = Row("buckets leave during backward", False, "a launch for every full bucket", str(cases[0]))
        return Verdict((row,), "never_launches")
    single, tied = [c for c in cases if not c.tied()], [c for c in cases if c.tied()]
    waits = [(c, c.wire.waits()[0]) for c in cases if c.wire.waits()]
    seen = f"call {waits[0][1].during + 1} waited for bucket {waits[0][1].bucket}" if waits else "no wait in any call"
    rows = (
        Row("nothing waits inside the hook", not waits, "launch, keep the handle, return", seen),
        _row("each bucket leaves once", "every bucket launched, none twice", cases,
             lambda c: sorted(c.order()) == list(range(len(c.buckets)))),
        _row("no bucket leaves before its last gradient", "launched in the call that fills it, or later", single,
             _not_early),
        _row("a parameter used twice is ready at its last use", "launched after the second call for it", tied,
             _not_early),
        _row("the same order on every rank", "buckets 0, 1, 2, … whichever fills first", cases,
             lambda c: c.order() == sorted(c.order())),
        _row("no bucket leaves late", "launched by the call that makes it possible", cases,
             lambda c: all(e.during <= c.due_at()[e.bucket] for e in c.wire.launches())),
        _row("the handle of each launch is kept", "in self.handles, for the wait of exercise 4.3", cases,
             lambda c: set(c.order()) <= set(c.kept)),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(cases, tied))


def _mistake(cases: list[Case], tied: list[Case]) -> str:
    """The mistake that explains what all cases show; the plainest one first."""
    if any(c.wire.waits() for c in cases):
        return "waits_at_once"
    if any(not _not_early(c) for c in tied):
        return "once_per_use"
    if any(c.order() != sorted(c.order()) for c in cases):
        return "arrival_order"
    if not any(set(c.order()) - {0} for c in cases):
        return "stays_at_the_first"
    if all(_at_most_one_per_call(c) for c in cases):
        return "one_per_call"
    if any(e.during > c.due_at()[e.bucket] for c in cases for e in c.wire.launches()):
        return "launches_late"
    return "drops_the_handles" if not all(set(c.order()) <= set(c.kept) for c in cases) else ""


def _not_early(case: Case) -> bool:
    full = case.full_at()
    return all(event.during >= full[event.bucket] for event in case.wire.launches())


def _at_most_one_per_call(case: Case) -> bool:
    calls = [event.during for event in case.wire.launches()]
    return len(calls) == len(set(calls))


def _row(name: str, expected: str, cases: list[Case], holds: Callable[[Case], bool]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: len(c.calls))
    seen = str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} backward passes"
    return Row(name, not broken, expected, seen)


def _pass(draw: random.Random, tied: bool, shuffled: bool) -> tuple[list[list[int]], dict[int, int], list[int]]:
    """Buckets, uses and the order of hook calls of one backward pass."""
    count = draw.randint(4, 8)
    ids = list(range(count))[::-1]
    cuts = sorted(draw.sample(range(1, count), draw.randint(1, 3)))
    buckets = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, count])]
    uses = dict.fromkeys(ids, 1)
    calls = list(ids)
    if tied:
        # The output layer shares the weight of the embedding: used first in backward, and last.
        uses[0] = 2
        calls.insert(0, 0)
    if shuffled:
        draw.shuffle(calls)
        if calls[0] in buckets[0]:
            calls.sort(key=lambda index: index in buckets[0])
    return buckets, uses, calls


def _played(answer: type, buckets: list[list[int]], uses: dict[int, int], calls: list[int]) -> Case:
    """The calls carried out on a fresh reducer."""
    wire = FakeWire(len(buckets))
    given = [list(bucket) for bucket in buckets]
    reducer = call(answer, given, dict(uses), wire, shown=f"Reducer({buckets}, {uses}, wire)")
    hook = getattr(reducer, "on_gradient_ready", None)
    if hook is None:
        raise Broke("the class has no method `on_gradient_ready`")
    for number, index in enumerate(calls):
        wire.call = number
        call(hook, index, shown=f"on_gradient_ready({index}), call {number + 1} of {calls},")
    return Case(buckets, uses, calls, wire, _buckets_of(getattr(reducer, "handles", None)))


def _buckets_of(handles: Any) -> list[int]:
    """The buckets of the handles in a collection; in a dictionary they are the values."""
    try:
        found = list(handles.values() if isinstance(handles, dict) else handles)
    except TypeError:
        return []
    return [handle.bucket for handle in found if isinstance(handle, FakeWork)]
