"""Exercise 4.3: finish the window.

The learner writes one method; this stands in the notebook above it, and `Reducer` is what they wrote in 4.2:

    class CompleteReducer(Reducer):
        def __init__(self, buckets, uses, wire, params):
            super().__init__(buckets, uses, wire)
            self.uses = dict(uses)    # as at the start of a window; self.uses_left is counted down
            self.params = params      # id -> parameter
            # self.wire.ranks         how many ranks there are
            # self.wire.flat[b]       the 1-D tensor of bucket b: launch(b) sums it over all ranks, in place
            # self.wire.views[id]     the part of it that belongs to parameter id, in the parameter's shape

        def finish(self):
            ...

Before each call of `on_gradient_ready(id)` the gradient has been copied from `params[id].grad` into
`wire.views[id]`. `finish` is called when backward is over. Then

- every bucket must have left, in order, also one that waits for a parameter which this rank did not use;
- every handle must have been waited for;
- each `params[id].grad` must be the mean over ranks, in memory of its own: the bucket is filled again in
  the next window. That holds for parameters that this rank did not use, too (they took part with zeros);
- the next window must work like the first, so the counters are full, and `wire.flat` is zero.

The check plays several ranks in one process, three windows each, with the learner's class on all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from course_lib.lab.errors import CheckFailed
from course_lib.lab.exercises.lab04.summing_wire import Plan, Played, SummingWire, Window
from course_lib.lab.guard import Broke, call
from course_lib.lab.model import Row, Verdict, exercise

if TYPE_CHECKING:
    from torch.nn import Parameter

HINTS = (
    "Five things, in this order: launch what is still here, wait, divide, give each parameter its gradient, and put "
    "the reducer back to where `__init__` left it.",
    "`self.next_bucket` says what has not left; launch all from there on, full or not. Wait for every handle before "
    "you touch a bucket. Then `self.wire.views[id]` holds the sum of a parameter: make a new tensor from it for "
    "`self.params[id].grad`. `self.buckets` and `self.uses` tell how the counters began.",
    "While self.next_bucket < len(self.buckets): append self.wire.launch(self.next_bucket) to self.handles and add 1. "
    "For each handle: handle.wait(). For index, view in self.wire.views.items(): self.params[index].grad = view / "
    "self.wire.ranks. For each flat in self.wire.flat: flat.zero_(). Then set uses_left, grads_left, next_bucket and "
    "handles as `__init__` does.",
)

MISTAKES = {
    "forgets_incomplete": "A bucket with a parameter that this rank did not use never gets full, so your hook never "
    "launches it, nor the ones behind it. The other ranks wait for them. `finish` launches what has not left.",
    "launches_again": "You launch buckets that have left already. The other ranks do not expect them a second time. "
    "Begin at `self.next_bucket`.",
    "waits_not_for_all": "`finish` uses or returns buckets that are still on the wire. Every handle needs its wait(): "
    "those that the hook kept during backward, and those that `finish` adds itself.",
    "waits_for_the_last": "You wait for the last handle only. One queue that works strictly in order would forgive "
    "that, and still lose the error of an earlier bucket. Gloo with several threads does not finish in order. Wait for "
    "each.",
    "touches_in_flight": "You change a bucket between its launch and its wait(). The wire is reading and writing that "
    "memory: what you write may be sent, overwritten or summed in part. Wait first.",
    "divides_twice": "Your gradients are divided by the number of ranks twice, so the model learns with a smaller rate "
    "than it was given. Divide once, in the hook or here.",
    "never_divides": "Your gradients are sums over the ranks. The mean is wanted: divide by `self.wire.ranks`. If you "
    "do, look whether you keep the result: `flat / ranks` makes a new tensor and leaves the bucket as it is.",
    "not_given_back": "`.grad` still holds what this rank computed alone. The result is in the bucket: give each "
    "parameter the part that `self.wire.views[id]` shows.",
    "points_into_the_bucket": "`.grad` is a view of the bucket. The bucket is zeroed and filled again in the next "
    "window, and the gradient changes with it under whoever holds it. Give the parameter a tensor of its own.",
    "unused_left_out": "A parameter that this rank did not use has `.grad` None, and you pass it by or trip over it. "
    "Another rank may have used it, and steps on its gradient: from there on the replicas differ. Set `.grad` for "
    "every parameter.",
    "not_reset": "The first window is right, a later one is not. Put back everything that a window uses up: the uses, "
    "the counts of the buckets, the next bucket and the handles. Make new objects: a list kept for the purpose is "
    "counted down itself.",
    "keeps_old_gradients": "A parameter that is not used in a later window still has the result of an earlier one in "
    "its bucket, and that is sent again. Leave `self.wire.flat` at zero when you have copied the gradients out, in "
    "place: `flat.zero_()`. A new tensor in the list leaves the bucket's own memory as it was.",
}


class TrippedOverNone(Broke):
    """`finish` broke on a None where, and only where, a parameter had no gradient."""


@exercise("4.3", title="finish the window", minutes=12, needs="CompleteReducer", hints=HINTS, mistakes=MISTAKES,
          kind="class")  # fmt: skip
def finish_the_window(answer: type, draw: random.Random) -> Verdict:
    """Rows over a dozen trainings of three windows each, with every rank's part of them played."""
    for name in ("on_gradient_ready", "finish"):
        if not callable(getattr(answer, name, None)):
            raise Broke(f"the class has no method `{name}`")
    _stop_at_a_stub(answer)
    played: list[Played] = []
    for number in range(12):
        plan = Plan.drawn(draw, skips=number % 4)
        try:
            played += _all_ranks(answer, plan)
        except TrippedOverNone as tripped:
            row = Row("also where this rank did not use the parameter", False, "the mean over ranks", str(tripped))
            return Verdict((row,), "unused_left_out")
    first = [p for p in played if p.number == 0]
    rows = (
        _row("full buckets leave during backward", 'as in exercise 4.2: let check("4.2", Reducer) pass first', first,
             lambda p: p.left_in_backward() == p.due),
        _row("every bucket leaves once, in order", "also those that are not full", first,
             lambda p: p.launched == list(range(len(p.buckets)))),
        _row("every handle is waited for", "a wait() for each launch", first, lambda p: not p.unwaited),
        _row("a bucket on the wire is left alone", "changed after its wait() at the earliest", first,
             lambda p: not p.touched),
        _row("each gradient is the mean over ranks", "sum / ranks", first, lambda p: all(p.right(i) for i in p.used)),
        _row("also where this rank did not use the parameter", "the mean, with zeros from this rank", first,
             lambda p: all(p.right(i) for i in p.unused)),
        _row("gradients have memory of their own", ".grad outside the bucket", first, lambda p: not p.inside),
        _row("the next windows work like the first", "the same again, twice",
             [p for p in played if p.number > 0], lambda p: p.whole),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(played, first))


def _mistake(played: list[Played], first: list[Played]) -> str:
    """The mistake that explains what is seen; the plainest one first, and the first window before the others."""
    if any(p.left_in_backward() != p.due for p in first):
        return ""
    if any(len(p.launched) > len(set(p.launched)) for p in first):
        return "launches_again"
    if any(len(p.launched) < len(p.buckets) for p in first):
        return "forgets_incomplete"
    if any(p.touched for p in first):
        return "touches_in_flight"
    if any(p.unwaited for p in first):
        return "waits_for_the_last" if all(p.waited == p.launched[-1:] for p in first) else "waits_not_for_all"
    if any(p.inside for p in first):
        return "points_into_the_bucket"
    used = [(p, i) for p in first for i in p.used]
    for factor, name in ((lambda p: p.ranks, "never_divides"), (lambda p: 1 / p.ranks, "divides_twice")):
        if used and all(p.equals(i, p.expected[i] * factor(p)) for p, i in used):
            return name
    if used and all(p.equals(i, p.local[i]) for p, i in used):
        return "not_given_back"
    if any(p.grads[i] is None for p in first for i in p.unused):
        return "unused_left_out"
    later = [p for p in played if p.number > 0]
    if not all(p.whole for p in first) or all(p.whole for p in later):
        return ""
    if all(p.launches_whole and all(p.right(i) for i in p.used) for p in later):
        return "keeps_old_gradients"
    return "not_reset"


def _row(name: str, expected: str, cases: list[Played], holds: Callable[[Played], bool]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: (c.number, len(c.local)))
    seen = str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} windows"
    return Row(name, not broken, expected, seen)


def _stop_at_a_stub(answer: type) -> None:
    """Raise `NotImplementedError` if `finish` is not written, also where the hook is not either."""
    plan = Plan.drawn(random.Random(0), skips=0)
    with suppress(Broke):
        reducer = call(answer, plan.buckets, plan.uses, SummingWire(plan, []), plan.parameters(), shown="")
        call(reducer.finish, shown="")


def _all_ranks(answer: type, plan: Plan) -> list[Played]:
    """Rank 0's windows. It goes last: by then it is known what the others put on the wire."""
    others = [SummingWire(plan, []) for _ in range(1, plan.ranks)]
    for rank, wire in enumerate(others, start=1):
        for _ in _play(answer, plan, rank, wire):
            pass
    wire = SummingWire(plan, others)
    played = zip(plan.windows[0], _play(answer, plan, 0, wire))
    return [Played.of(wire, params, plan, window) for window, params in played]


def _play(answer: type, plan: Plan, rank: int, wire: SummingWire) -> Iterator[dict[int, Parameter]]:
    """Carry out the windows of one rank on a fresh reducer; the parameters after each."""
    params = plan.parameters()
    shown = f"CompleteReducer({plan.buckets}, {plan.uses}, wire, params)"
    reducer = call(answer, [list(b) for b in plan.buckets], dict(plan.uses), wire, params, shown=shown)
    for window in plan.windows[rank]:
        wire.begin(window.number)
        _backward(reducer, wire, params, window)
        wire.call = len(window.calls)
        unused = [index for index, param in params.items() if param.grad is None]
        try:
            call(reducer.finish, shown=f"finish() after the {len(window.calls)} calls of window {window.number + 1}")
        except Broke as broke:
            if unused and "NoneType" in str(broke):
                raise TrippedOverNone(f"parameter {unused[0]} was not used here, and {broke}") from broke
            raise
        yield params


def _backward(reducer: Any, wire: SummingWire, params: dict[int, Parameter], window: Window) -> None:
    """The micro-steps of a window: each gradient grows, is copied into its bucket, and the hook is called."""
    for param in params.values():
        param.grad = None
    for place, (index, part) in enumerate(window.calls):
        wire.call, param = place, params[index]
        param.grad = part.clone() if param.grad is None else param.grad + part
        wire.views[index].copy_(param.grad)
        shown = f"on_gradient_ready({index}), call {place + 1} of {len(window.calls)} in window {window.number + 1},"
        try:
            call(reducer.on_gradient_ready, index, shown=shown)
        except NotImplementedError:
            raise CheckFailed(
                "exercise 4.3 continues the class of exercise 4.2, and `on_gradient_ready` is not written yet: solve "
                "4.2, run its cell, then the cell of 4.3, then this one again."
            ) from None
