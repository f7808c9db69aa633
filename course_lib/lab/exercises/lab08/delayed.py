"""Exercise 8.2: a gradient is applied `delay` windows after its own.

The learner writes three methods; the cell of the exercise gives the rest:

    class Delayed:
        def __init__(self, wire, param, optimizer, delay):
            self.wire, self.param, self.optimizer, self.delay = wire, param, optimizer, delay
            self.under_way = []                  # oldest first

        def apply_oldest(self): ...              # wait for the oldest gradient under way, make it param.grad, step
        def end_of_window(self, gradient): ...   # this rank's gradient of the window that has just run
        def flush(self): ...                     # after the last window: what is left, one step each

`wire.launch(gradient)` starts the mean over the ranks in place and returns a handle. Each window's gradient depends on
the parameters it was computed with, so the check can tell from the parameters alone which gradient went where.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from course_lib.lab.exercises.lab08.delay_wire import Optimizer, Wire
from course_lib.lab.guard import Broke, call
from course_lib.lab.model import Row, Verdict, exercise

if TYPE_CHECKING:
    from torch import Tensor

HINTS = (
    "Follow one gradient: it is launched at the end of its window, waits in a queue while `delay` further windows run, "
    "and is applied once. How long is the queue at the end of a window, before and after?",
    "`end_of_window` launches and appends, always. If more than `delay` are under way then, the oldest is due: "
    "apply_oldest takes it from the front, waits for *it*, and steps the parameters as they are now. `flush` repeats "
    "that until nothing is left.",
    "apply_oldest: gradient, handle = self.under_way.pop(0); handle.wait(); self.param.grad = gradient; "
    "self.optimizer.step(). end_of_window: self.under_way.append((gradient, self.wire.launch(gradient))); "
    "if len(self.under_way) > self.delay: self.apply_oldest(). flush: while self.under_way: self.apply_oldest().",
)

MISTAKES = {
    "before_arrival": "You step with a gradient that is still on its way: its memory belongs to the wire until its "
    "wait(). Wait for the gradient that you apply.",
    "own_gradient": "You step with this rank's own gradient, not with the mean over ranks. The ranks drift apart. What "
    "was launched holds the mean after its wait(); apply that tensor.",
    "waits_at_once": "The right gradient is applied in the right step, but you wait for it in its own window. It does "
    "not travel under anything. Wait when it is applied.",
    "no_delay": "Each gradient is applied at the end of its own window: that is delay 0, whatever `delay` says. Apply "
    "the oldest one, and only when more than `delay` are under way.",
    "one_too_late": "Each gradient is applied one window later than it should be. Is it appended before you count? "
    "More than `delay` under way, this window's included, means that the oldest is due.",
    "one_too_early": "Each gradient is applied one window earlier than it should be. This window's own is in the queue "
    "when you count: only when *more* than `delay` are under way is the oldest due.",
    "steps_on_nothing": "You call optimizer.step() in the first windows, when nothing has arrived. A step without a "
    "gradient is not nothing: with a gradient of zeros, momentum and weight decay move the parameters, and Adam counts "
    "it. Do not step.",
    "loses_the_first": "The first gradient is launched and never applied. The first windows apply nothing, but they "
    "do put their gradient into the queue.",
    "loses_the_last": "What is under way when training ends is never applied. flush owes a step for each.",
    "all_in_one_step": "flush makes one step of all that is left. Each gradient is an update of its own: momentum and "
    "weight decay count steps. One wait and one step for each.",
    "newest_first": "You apply the newest gradient and let the older ones lie. Take from the front of the queue: the "
    "one that has travelled longest.",
    "old_parameters": "You put the parameters back to what they were when the gradient was computed, and step from "
    "there. That undoes the update in between: you train two models in turn. A late gradient is applied to the "
    "parameters of *now*; that is what makes it late.",
}


LR, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 0.1


class Problem(NamedTuple):
    """Window t: this rank's gradient is a[t]·θ + c[t], the other ranks' add up to others[t]."""

    delay: int
    ranks: int
    start: Tensor
    a: list[Tensor]
    c: list[Tensor]
    others: list[Tensor]


class Played(NamedTuple):
    """Parameters after each window and after the flush, as seen and as they should be; optimizer steps by then; and in
    which call each gradient was waited for (the number of windows stands for the flush)."""

    problem: Problem
    seen: list[Tensor]
    want: list[Tensor]
    steps: list[int]
    waited: list[int | None]

    def same(self, other: Sequence[Tensor], count: int | None = None) -> bool:
        import torch
        return torch.allclose(torch.stack(self.seen[:count]), torch.stack(list(other[:count])), rtol=1e-5, atol=1e-6)

    def early(self) -> list[int]:
        due = [t + self.problem.delay for t in range(len(self.problem.a))]
        return [t for t, (at, by) in enumerate(zip(self.waited, due)) if at is not None and at < min(by, len(due))]

    def on_nothing(self) -> bool:
        """Were there more steps in the first windows than gradients that had arrived?"""
        first = self.problem.delay
        return self.steps[first - 1] > sum(at is not None and at < first for at in self.waited)

    def __str__(self) -> str:
        windows, d = len(self.problem.a), self.problem.delay
        wrong = [t for t in range(windows + 1) if not self.same(self.want, t + 1)]
        said = [f"delay {d}, {windows} windows: {', '.join(map(str, self.steps[:-1]))} steps made by their ends and "
                f"{self.steps[-1]} after flush"]
        if wrong:
            said.append("parameters are wrong after " + ("flush" if wrong[0] == windows else f"window {wrong[0]}"))
        if self.early():
            said.append(f"waited too early for gradient {', '.join(map(str, self.early()))}")
        return "; ".join(said)


@exercise("8.2", title="delay the update", minutes=8, needs="Delayed", hints=HINTS, mistakes=MISTAKES,
          kind="class")  # fmt: skip
def delay_the_update(answer: type, draw: random.Random) -> Verdict:
    """Rows over trainings with delays of 0 to 3."""
    for name in ("apply_oldest", "end_of_window", "flush"):
        if not callable(getattr(answer, name, None)):
            raise Broke(f"the class has no method `{name}`")
    played = [_played(answer, _problem(draw, delay)) for delay in (1, 1, 2, 0, 3, draw.randint(1, 3))]
    late = [p for p in played if p.problem.delay]
    windows = len(played[0].problem.a)
    rows = (
        _row("delay 0 is the plain step", "the gradient of each window, at its end",
             [p for p in played if not p.problem.delay], lambda p: p.same(p.want)),
        _row("nothing is stepped before the first gradient is due", "no step in the first `delay` windows", late,
             lambda p: p.steps[p.problem.delay - 1] == 0),
        _row("each window applies the gradient of `delay` windows ago", "to the parameters of now", late,
             lambda p: p.same(p.want, windows)),
        _row("a gradient travels under the windows after it", "waited for when it is applied", late,
             lambda p: not p.early()),
        _row("flush applies what is left", "one step each", late, lambda p: p.same(p.want)),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(late))


def wanted(problem: Problem, delay: int | None = None, **how: Any) -> list[Tensor]:
    """Parameters after each window and after the flush. `how` makes a known mistake: this rank's `own` gradients in
    place of the mean, or steps from the `old_parameters` that a gradient was computed with."""
    theta, moment, queue, seen = problem.start, None, [], []
    delay = problem.delay if delay is None else delay

    def stepped() -> tuple[Tensor, Tensor]:
        gradient, old = queue.pop(0)
        at = old if how.get("old_parameters") else theta
        gradient = gradient + WEIGHT_DECAY * at
        velocity = gradient if moment is None else MOMENTUM * moment + gradient
        return at - LR * velocity, velocity

    for a, c, others in zip(problem.a, problem.c, problem.others):
        mine = a * theta + c
        queue.append((mine if how.get("own") else (mine + others) / problem.ranks, theta))
        if len(queue) > delay:
            theta, moment = stepped()
        seen.append(theta)
    while queue:
        theta, moment = stepped()
    return [*seen, theta]


def _mistake(late: list[Played]) -> str:
    """The mistake that explains what all delayed trainings show; the plainest one first."""
    windows = len(late[0].problem.a)
    if any(bool(s.isnan().any()) for p in late for s in p.seen):
        return "before_arrival"
    for mistake, delay in (("no_delay", lambda d: 0), ("one_too_early", lambda d: d - 1)):
        if all(p.same(wanted(p.problem, delay(p.problem.delay)), windows) for p in late):
            return mistake
    if any(p.on_nothing() for p in late):
        return "steps_on_nothing"
    for mistake, how in (("own_gradient", {"own": True}), ("old_parameters", {"old_parameters": True})):
        if all(p.same(wanted(p.problem, **how), windows) for p in late):
            return mistake
    if all(p.same(wanted(p.problem, p.problem.delay + 1), windows) for p in late):
        return "one_too_late"
    if all(p.same(p.want, windows) for p in late):
        if any(p.early() for p in late):
            return "waits_at_once"
        if all(p.steps[-1] == p.steps[-2] for p in late):
            return "loses_the_last"
        deep = [p for p in late if p.problem.delay > 1]
        return "all_in_one_step" if all(p.steps[-1] == p.steps[-2] + 1 for p in deep) else ""
    if not all(p.steps[-2] for p in late):
        return ""
    if all(p.waited[0] is None for p in late):
        return "loses_the_first"
    return "newest_first" if all(p.waited[0] == windows for p in late) else ""


def _problem(draw: random.Random, delay: int, windows: int = 7, size: int = 4) -> Problem:
    import torch

    def some(low: float, high: float) -> Tensor:
        return torch.tensor([draw.uniform(low, high) for _ in range(size)])

    return Problem(delay, draw.randint(2, 4), some(1, 2), *([some(*span) for _ in range(windows)] for span in
                                                           ((0.5, 1.5), (-2, 2), (-2, 2))))  # fmt: skip


def _played(answer: type, problem: Problem) -> Played:
    import torch

    param, wire, steps = torch.nn.Parameter(problem.start.clone()), Wire(problem.others, problem.ranks), []
    optimizer = Optimizer(param, LR, MOMENTUM, WEIGHT_DECAY)
    mine, seen = call(answer, wire, param, optimizer, problem.delay, shown="Delayed(wire, param, optimizer, delay)"), []
    for t, (a, c) in enumerate(zip(problem.a, problem.c)):
        wire.call = t
        call(mine.end_of_window, (a * param + c).detach(), shown="end_of_window(gradient)")
        seen.append(param.detach().clone())
        steps.append(optimizer.steps)
    wire.call = len(problem.a)
    call(mine.flush, shown="flush()")
    return Played(problem, [*seen, param.detach().clone()], wanted(problem), [*steps, optimizer.steps],
                  wire.waited + [None] * (len(problem.a) - len(wire.waited)))


def _row(name: str, expected: str, cases: list[Played], holds: Callable[[Played], bool]) -> Row:
    """One rule over all its cases. The case of the smallest delay that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: c.problem.delay)
    return Row(name, not broken, expected, str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} runs")
