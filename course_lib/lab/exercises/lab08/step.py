"""Exercise 8.1: the optimizer's step bucket by bucket.

The learner writes two methods; the cell of the exercise gives the rest:

    class StepPerBucket:
        def __init__(self, wire, optimizers, scheduler):
            self.wire = wire                # wire.launch(b) -> handle of the mean over ranks of bucket b
            self.optimizers = optimizers    # optimizers[b].step() updates the parameters of bucket b
            self.scheduler = scheduler      # scheduler.step() moves the learning rate on
            self.handles = []

        def bucket_full(self, b, last): ...  # in every backward; `last` in the update's last micro-step
        def finish(self): ...                # once an update, after the last backward

The check plays updates on a clock of its own, so it sees what was waited for before what was stepped.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from course_lib.lab.exercises.lab08.clocked import Clock, Optimizer, Scheduler, Update, Wire
from course_lib.lab.guard import Broke, call
from course_lib.lab.model import Row, Verdict, exercise

HINTS = (
    "Which micro-step's bucket holds the gradient of the whole window? Only that one may be sent. And when may bucket "
    "0 be updated: when all buckets have arrived, or when bucket 0 has?",
    "`bucket_full` launches in the last micro-step and keeps the number and the handle; it never waits. `finish` goes "
    "through them in order: wait for one, step that one, then the next. While you step bucket 0, bucket 1 travels.",
    "bucket_full: if last: self.handles.append((b, self.wire.launch(b))). finish: for b, handle in self.handles: "
    "handle.wait(); self.optimizers[b].step(). After the loop: self.scheduler.step(); self.handles = [].",
)

MISTAKES = {
    "every_micro_step": "You send or step in every micro-step. The gradients of an update are complete in its last "
    "one; before it they only add up. Look at `last`.",
    "sent_late": "You launch a bucket later than it is full, so less of it travels under backward, or nothing. Launch "
    "each bucket in its own bucket_full.",
    "before_arrival": "You step a bucket whose handle nobody waited for. What it holds then is this rank's own "
    "gradient, or half of the sum. Every rank takes another step, and from there on they are different models.",
    "all_first": "You wait for all buckets and then step. That is right, and it is what optimizer.step() after "
    "backward does already: nothing of it hides. Step each bucket right after its own wait.",
    "waits_in_backward": "You wait inside bucket_full. Backward stands still until the bucket has arrived. Launch "
    "there, wait in finish.",
    "clears_first": "You call zero_grad() on a bucket whose gradient has not been used yet. What arrived, or what the "
    "micro-steps have added up, is gone, and the step moves nothing. After the step it does no harm; here nobody needs "
    "it.",
    "scheduler_per_bucket": "The scheduler moves on after each bucket, so the buckets of one update have different "
    "learning rates, and the schedule ends long before training does. Once an update, after the loop.",
    "scheduler_first": "The scheduler moves on before the last bucket is updated: some or all of this update are "
    "made with the learning rate of the next. Call it after the loop.",
    "no_scheduler": "The scheduler never moves, so the learning rate stays what it was. Call it once an update.",
    "keeps_handles": "The first update is right, the second steps its buckets twice: the handles of the first are "
    "still in your list, they have long arrived, and so they are stepped again. Empty the list in finish.",
    "drops_the_last": "A bucket is never updated, and it was launched, so it is the stepping that leaves it out. Does "
    "your loop reach the last one?",
}


@exercise("8.1", title="step each bucket when it is there", minutes=10, needs="StepPerBucket", hints=HINTS,
          mistakes=MISTAKES, kind="class")  # fmt: skip
def step_per_bucket(answer: type, draw: random.Random) -> Verdict:
    """Rows over some ten trainings of two updates each."""
    for name in ("bucket_full", "finish"):
        if not callable(getattr(answer, name, None)):
            raise Broke(f"the class has no method `{name}`")
    shapes = [(1, 3), (2, 2), *((draw.randint(1, 4), draw.randint(2, 6)) for _ in range(8))]
    updates = [one for micro_steps, buckets in shapes for one in _updates(answer, micro_steps, buckets)]
    first = [u for u in updates if u.number == 0]
    rows = (
        _row("only the last micro-step sends and steps", "nothing before it", first, lambda u: not u.sent_early),
        _row("a bucket leaves when it is full", "launched in bucket_full", first, lambda u: not u.sent_late),
        _row("a bucket is stepped after its own wait", "wait, then step", first, lambda u: not u.stepped_early),
        _row("backward never waits", "no wait in bucket_full", first, lambda u: not u.waited_in_backward),
        _row("a bucket is stepped before a later one is waited for", "the step hides under the wire", first,
             lambda u: not u.stepped_late),
        _row("a gradient is kept until its step", "no zero_grad() before it", first, lambda u: not u.cleared),
        _row("each bucket is updated once", "every bucket, each once", first, Update.once),
        _row("the scheduler moves once, at the end", "one call, after the last step", first,
             lambda u: u.scheduler == [len(u.stepped)]),
        _row("the next update works like the first", "the same again", [u for u in updates if u.number],
             Update.right),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(updates))


def _mistake(updates: list[Update]) -> str:
    """The mistake that explains what is seen; the plainest one first."""
    first = [u for u in updates if u.number == 0]
    if any(u.sent_early for u in first):
        return "every_micro_step"
    if any(u.sent_late for u in first):
        return "sent_late"
    if any(u.stepped_early for u in first):
        return "before_arrival"
    if any(u.waited_in_backward for u in first):
        return "waits_in_backward"
    if any(u.stepped_late for u in first):
        return "all_first"
    if any(u.cleared for u in first):
        return "clears_first"
    if any(len(u.scheduler) > 1 for u in first):
        return "scheduler_per_bucket"
    if not all(u.once() for u in first):
        launched = all(sorted(u.launched) == list(range(u.buckets)) for u in first)
        return "drops_the_last" if launched and all(len(set(u.stepped)) == len(u.stepped) for u in first) else ""
    if not any(u.scheduler for u in first):
        return "no_scheduler"
    if any(u.scheduler != [len(u.stepped)] for u in first):
        return "scheduler_first"
    return "keeps_handles" if any(len(u.stepped) > u.buckets for u in updates) else ""


def _updates(answer: type, micro_steps: int, buckets: int) -> list[Update]:
    clock, noted = Clock(), []
    optimizers = [Optimizer(clock, b) for b in range(buckets)]
    mine = call(answer, Wire(clock), optimizers, Scheduler(clock), shown="StepPerBucket(wire, optimizers, scheduler)")
    for number in range(2):
        clock.begin(number, micro_steps, buckets)
        clock.in_backward = True
        for i in range(micro_steps):
            for b in range(buckets):
                clock.fill(b, i == micro_steps - 1)
                call(mine.bucket_full, b, clock.last, shown=f"bucket_full({b}, {clock.last})")
        clock.in_backward = False
        call(mine.finish, shown="finish()")
        noted.append(clock.noted)
    return noted


def _row(name: str, expected: str, cases: list[Update], holds: Callable[[Update], bool]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: (c.micro_steps, c.buckets))
    seen = str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} updates"
    return Row(name, not broken, expected, seen)
