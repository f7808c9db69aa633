"""Exercise 2.1: the blocking baseline.

The learner writes `average_gradients(params, ranks, all_reduce)`; every rank calls it after every backward:

- `params` lists the parameters of this rank's replica, in the same order on every rank.
- `all_reduce(tensor)` replaces the tensor by its sum over all ranks, in place, and returns when it has arrived.
  It is a collective: every rank has to make the same calls, in the same order.
- Afterwards `.grad` of every parameter is the mean over the ranks. A rank that did not use a parameter has
  `.grad` None there, and takes part with zeros.

One call a parameter, or one for all of them together: the check accepts both. It plays two to four ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from course_lib.lab.exercises.lab02.replay import Exchange, Hang, Outcome, calls_text, replay
from course_lib.lab.guard import Broke, call
from course_lib.lab.model import Row, Verdict, exercise

if TYPE_CHECKING:
    from torch import Tensor

HINTS = (
    "What travels is the gradient, not the parameter. all_reduce leaves a sum, and you want a mean. And every rank "
    "has to enter every collective, whether it has something to give or not.",
    "Go through the parameters. Where `.grad` is None, make it a tensor of zeros in the parameter's shape: this rank "
    "then takes part, and gets the mean of the others. Then all_reduce the gradient and divide it.",
    "for param in params: if param.grad is None: param.grad = torch.zeros_like(param). Then all_reduce(param.grad). "
    "Then param.grad /= ranks. There is no `continue` in the loop.",
)

MISTAKES = {
    "reduces_the_parameter": "You send the parameter itself. The replicas hold the same parameters already, so their "
    "mean changes nothing, and their gradients stay apart. Send `param.grad`.",
    "changes_the_parameter": "Your function changes the parameters. It averages gradients and nothing else: the "
    "optimizer steps later, and once.",
    "never_divides": "Your gradients are sums over the ranks. With four ranks every update is four times as large as "
    "the learning rate says. Divide by `ranks`. If you do, look whether you keep the result: `param.grad / ranks` "
    "makes a new tensor.",
    "divides_twice": "Your gradients are divided by the number of ranks twice, so every update is too small. Divide "
    "once: before the sum or after it.",
    "skips_missing": "A rank whose `.grad` is None passes a collective by. The others wait in it, for ever, or are "
    "given the data of the next one. Take part with zeros.",
    "trips_over_none": "A rank that did not use a parameter has `.grad` None, and your function breaks there. Give it "
    "a gradient of zeros first.",
    "leaves_none": "A rank that did not use a parameter takes part, but its `.grad` is None afterwards. The others "
    "step on the mean, this rank does not, and the replicas drift apart. Give it the mean too.",
    "not_given_back": "`.grad` still holds what this rank computed alone. You all-reduce a copy: put the result back "
    "into `.grad`, or send `.grad` itself.",
    "never_sends": "Your function never calls all_reduce, so nothing leaves this rank.",
}


class Replica(NamedTuple):
    """What one rank holds after the call: gradients, whether parameters were changed, and whether one was sent."""

    grads: list[Tensor | None]
    parameters_changed: bool
    parameters_sent: bool

    @property
    def parameters_touched(self) -> bool:
        return self.parameters_changed or self.parameters_sent


class Case(NamedTuple):
    """One micro-step: `before[rank][i]` is the gradient that a rank computed for parameter i, or None."""

    before: list[list[Tensor | None]]
    mean: list[Tensor]
    outcomes: list[Outcome]

    @property
    def ranks(self) -> int:
        return len(self.before)

    @property
    def whole(self) -> bool:
        return all(grad is not None for grads in self.before for grad in grads)

    @property
    def hangs(self) -> bool:
        return any(o.hangs for o in self.outcomes) or len({o.calls for o in self.outcomes}) > 1

    def holds(self, factor: float) -> bool:
        """Whether every rank has `factor` times the mean, for every parameter."""
        return not self.hangs and all(_close(grad, mean * factor) for o in self.outcomes
                                      for grad, mean in zip(o.result.grads, self.mean))  # fmt: skip

    def unchanged(self) -> bool:
        return not self.hangs and all(_close(grad, own) for o, grads in zip(self.outcomes, self.before)
                                      for grad, own in zip(o.result.grads, grads))  # fmt: skip

    def __str__(self) -> str:
        said = f"{self.ranks} ranks, {len(self.mean)} parameters"
        if gaps := [f"rank {r} has no gradient for parameter {i}" for r, grads in enumerate(self.before)
                    for i, grad in enumerate(grads) if grad is None]:  # fmt: skip
            said += f", {gaps[0]}"
        if self.hangs:
            return f"{said}: {calls_text(self.outcomes)}"
        for rank, outcome in enumerate(self.outcomes):
            for i, (grad, mean) in enumerate(zip(outcome.result.grads, self.mean)):
                if not _close(grad, mean):
                    found = "None" if grad is None else f"{float(grad.flatten()[0]):.4g}"
                    return (f"{said}: on rank {rank} the first element of parameter {i}'s gradient is {found}, the "
                            f"mean is {float(mean.flatten()[0]):.4g}")  # fmt: skip
        return said


@exercise("2.1", title="the blocking baseline", minutes=8, needs="average_gradients", hints=HINTS, mistakes=MISTAKES)
def average_the_gradients(answer: Callable, draw: random.Random) -> Verdict:
    """Rows over a dozen micro-steps in which all ranks use all parameters, and as many in which one does not."""
    whole = [_played(answer, draw, gaps=0) for _ in range(8)]
    try:
        gaps = [_played(answer, draw, gaps=1 + number % 2) for number in range(8)]
    except Broke as broke:
        return Verdict((Row("a rank without a gradient takes part", False, "zeros from that rank", str(broke)),),
                       "trips_over_none")  # fmt: skip
    cases = [*whole, *gaps]
    rows = (
        _row("every rank enters every collective", "the same number of calls on all ranks", cases,
             lambda c: not c.hangs),
        _row("something is sent", "one call, or one a parameter", whole,
             lambda c: all(o.calls for o in c.outcomes)),
        _row("parameters stay as they are", "only gradients are sent and changed", cases,
             lambda c: not any(o.result and o.result.parameters_touched for o in c.outcomes)),
        _row("each gradient is the mean over ranks", "sum / ranks on every rank", whole, lambda c: c.holds(1)),
        _row("also where a rank has no gradient", "the mean, with zeros from that rank", gaps, lambda c: c.holds(1)),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(whole, gaps))


def _mistake(whole: list[Case], gaps: list[Case]) -> str:
    """The mistake that explains what all cases show; the plainest one first."""
    if any(o.result and o.result.parameters_sent for c in whole for o in c.outcomes):
        return "reduces_the_parameter"
    if any(o.result and o.result.parameters_changed for c in whole for o in c.outcomes):
        return "changes_the_parameter"
    if not any(o.calls for c in whole for o in c.outcomes):
        return "never_sends"
    if any(c.hangs for c in whole):
        return ""
    if all(c.unchanged() for c in whole):
        return "not_given_back"
    if all(c.holds(c.ranks) for c in whole):
        return "never_divides"
    if all(c.holds(1 / c.ranks) for c in whole):
        return "divides_twice"
    if not all(c.holds(1) for c in whole):
        return ""
    if any(c.hangs for c in gaps):
        return "skips_missing"
    if any(grad is None for c in gaps for o in c.outcomes for grad in o.result.grads):
        return "leaves_none"
    return ""


def _row(name: str, expected: str, cases: list[Case], holds: Callable[[Case], bool]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: (c.ranks, len(c.mean)))
    seen = str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} micro-steps"
    return Row(name, not broken, expected, seen)


def _close(found: Tensor | None, right: Tensor | None) -> bool:
    import torch

    if found is None or right is None:
        return found is right
    return found.shape == right.shape and bool(torch.allclose(found, right, rtol=1e-4, atol=1e-6))


def _played(answer: Callable, draw: random.Random, gaps: int) -> Case:
    """One micro-step on all ranks. With `gaps`, that many ranks miss one parameter each."""
    import torch

    ranks, shapes = draw.randint(2, 4), [draw.choice([(3,), (2, 3), (4,), (1,)]) for _ in range(draw.randint(2, 4))]

    def some(shape: tuple[int, ...]) -> Tensor:
        size = torch.Size(shape).numel()
        return torch.tensor([draw.choice((-1, 1)) * draw.uniform(0.5, 2) for _ in range(size)]).view(shape)

    values = [some(shape) for shape in shapes]
    before: list[list[Tensor | None]] = [[some(shape) for shape in shapes] for _ in range(ranks)]
    for rank in draw.sample(range(ranks), min(gaps, ranks - 1)):
        before[rank][draw.randrange(len(shapes))] = None
    mean = [sum((torch.zeros(shape) if grad is None else grad for grad in grads), torch.zeros(shape)) / ranks
            for shape, grads in zip(shapes, zip(*before))]  # fmt: skip

    def play(rank: int, exchange: Exchange) -> Replica:
        params = [torch.nn.Parameter(value.clone()) for value in values]
        for param, grad in zip(params, before[rank]):
            param.grad = None if grad is None else grad.clone()
        sent: list[Tensor] = []

        def all_reduce(tensor: Any) -> None:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"all_reduce takes a tensor, not {type(tensor).__name__}")
            sent.append(tensor.detach().clone())
            parts = exchange(sent[-1])
            if any(part.shape != tensor.shape for part in parts):
                raise Hang
            with torch.no_grad():
                tensor.copy_(sum(parts[1:], parts[0]))

        call(answer, list(params), ranks, all_reduce, shown=f"average_gradients(params, {ranks}, all_reduce)")
        grads = [None if p.grad is None else p.grad.detach().clone() for p in params]
        changed = not all(torch.equal(p.detach(), value) for p, value in zip(params, values))
        travelled = any(torch.equal(part, value) for part in sent for value in values if part.shape == value.shape)
        return Replica(grads, changed, travelled)

    return Case(before, mean, replay(play, ranks))
