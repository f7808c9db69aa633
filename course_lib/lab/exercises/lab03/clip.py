"""Exercise 3.4: clipping at the right place.

The learner writes `clipped_update(params, N, micro_step, synchronise, step, max_norm)`; every rank calls it once an
update:

- `micro_step(i)` runs forward and backward of micro-batch i and adds its gradient, already scaled by 1/N.
- `synchronise()` replaces every `.grad` by its mean over the ranks. It is a collective.
- `step()` steps the optimizer on what `.grad` holds.
- What the optimizer sees has a global norm of at most `max_norm`, over all parameters together. A gradient that is
  shorter is left alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from course_lib.lab.exercises.lab02.replay import Exchange, Outcome, calls_text, replay
from course_lib.lab.guard import Broke, call
from course_lib.lab.model import Row, Verdict, exercise

if TYPE_CHECKING:
    from torch import Tensor

Grads = list["Tensor"]

HINTS = (
    "The norm that counts is that of the gradient which the optimizer is about to use. When does this gradient exist "
    "for the first time?",
    "All N micro-steps, then synchronise, then one norm over all parameters together, then the step. After synchronise "
    "every rank holds the same gradient, so every rank finds the same norm without another collective.",
    "for i in range(N): micro_step(i). synchronise(). torch.nn.utils.clip_grad_norm_(params, max_norm). step().",
)

MISTAKES = {
    "every_micro_step": "You clip in every micro-step. What is clipped there is an unfinished sum, so the window's "
    "direction changes with the order of its micro-batches. Clip once, at the end.",
    "before_synchronisation": "You clip before the ranks have synchronised, by this rank's own norm. Every rank scales "
    "by another factor, so the mean is not the clipped gradient; clipping it once more afterwards repairs nothing. "
    "Synchronise first, then clip once.",
    "per_parameter": "You clip each parameter by its own norm. That bends the gradient into another direction. One "
    "norm over all parameters, one factor for all.",
    "per_element": "You limit each element by itself, as `clip_grad_value_` does. That bends the gradient into another "
    "direction. Scale all of it by one factor.",
    "always_scales": "You scale a gradient that is shorter than max_norm up to it. A small gradient near a minimum is "
    "meant to be small: leave it alone.",
    "never_clips": "The optimizer sees the gradient as it was. Clip between synchronise() and step().",
    "syncs_every": "You synchronise in every micro-step. The gradient comes out right, and the wire carries it N "
    "times.",
    "never_syncs": "Nobody calls synchronise(), or not before step(). Each rank steps on its own gradient.",
}


class Case(NamedTuple):
    """One update: `micro[rank][i]` are the gradients of a micro-step. `outcomes` hold what the optimizer saw."""

    micro: list[list[Grads]]
    max_norm: float
    outcomes: list[Outcome]

    @property
    def hangs(self) -> bool:
        return any(o.hangs for o in self.outcomes) or len({o.calls for o in self.outcomes}) > 1

    def sees(self, rule: Callable[[list[list[Grads]], float], list[Grads]]) -> bool:
        """Whether every rank's optimizer saw what `rule` gives it."""
        import torch

        return not self.hangs and all(
            torch.allclose(found, right, rtol=1e-3, atol=1e-5)
            for o, grads in zip(self.outcomes, rule(self.micro, self.max_norm)) for found, right in zip(o.result, grads)
        )  # fmt: skip

    def __str__(self) -> str:
        said = f"{len(self.micro)} ranks, N={len(self.micro[0])}, max_norm {self.max_norm:.3g}"
        if self.hangs:
            return f"{said}: {calls_text(self.outcomes)}"
        whole = _right(self.micro, float("inf"))[0]
        seen = ", ".join(f"{_norm(o.result):.4g}" for o in self.outcomes)
        return f"{said}: the mean gradient has norm {_norm(whole):.4g}; the optimizers saw gradients of norm {seen}"


@exercise("3.4", title="clip at the right place", minutes=5, needs="clipped_update", hints=HINTS, mistakes=MISTAKES)
def clip_at_the_right_place(answer: Callable, draw: random.Random) -> Verdict:
    """Rows over updates whose gradient is longer than max_norm, and over others whose is not."""
    long, fine = ([_played(answer, draw, clips) for _ in range(6)] for clips in (True, False))
    cases = [*long, *fine]
    rows = (
        _row("the ranks synchronise once", "one call of synchronise() on each rank", cases,
             lambda c: all(o.calls == 1 for o in c.outcomes)),
        _row("a gradient that is too long", "the mean over ranks, scaled to max_norm", long, lambda c: c.sees(_right)),
        _row("a gradient that is not", "the mean over ranks as it is", fine, lambda c: c.sees(_right)),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(cases))


def _mistake(cases: list[Case]) -> str:
    """The rule that all cases follow."""
    if any(c.hangs for c in cases):
        return ""
    if all(o.calls == 0 for c in cases for o in c.outcomes) or all(c.sees(_alone) for c in cases):
        return "never_syncs"
    if all(o.calls == len(c.micro[0]) for c in cases for o in c.outcomes) and all(c.sees(_right) for c in cases):
        return "syncs_every"
    rules = {"never_clips": _unclipped, "every_micro_step": _every_micro_step,
             "before_synchronisation": _before_synchronisation, "per_parameter": _per_parameter,
             "per_element": _per_element, "always_scales": _always_scales}  # fmt: skip
    return next((name for name, rule in rules.items() if all(c.sees(rule) for c in cases)), "")


def _norm(grads: Grads) -> float:
    return sum(float(grad.square().sum()) for grad in grads) ** 0.5


def _clipped(grads: Grads, max_norm: float) -> Grads:
    factor = min(1.0, max_norm / max(_norm(grads), 1e-12))
    return [grad * factor for grad in grads]


def _mean(grads: list[Grads]) -> Grads:
    return [sum(parts[1:], parts[0]) / len(parts) for parts in zip(*grads)]


def _summed(micro: list[list[Grads]]) -> list[Grads]:
    """What each rank has accumulated after its window."""
    return [[sum(parts[1:], parts[0]) for parts in zip(*rank)] for rank in micro]


def _right(micro: list[list[Grads]], max_norm: float) -> list[Grads]:
    return [_clipped(_mean(_summed(micro)), max_norm)] * len(micro)


def _unclipped(micro: list[list[Grads]], max_norm: float) -> list[Grads]:
    return _right(micro, float("inf"))


def _alone(micro: list[list[Grads]], max_norm: float) -> list[Grads]:
    return [_clipped(grads, max_norm) for grads in _summed(micro)]


def _before_synchronisation(micro: list[list[Grads]], max_norm: float) -> list[Grads]:
    return [_mean(_alone(micro, max_norm))] * len(micro)


def _every_micro_step(micro: list[list[Grads]], max_norm: float) -> list[Grads]:
    ends = []
    for rank in micro:
        held = [grad * 0 for grad in rank[0]]
        for grads in rank:
            held = _clipped([a + b for a, b in zip(held, grads)], max_norm)
        ends.append(held)
    return [_mean(ends)] * len(micro)


def _per_parameter(micro: list[list[Grads]], max_norm: float) -> list[Grads]:
    return [[_clipped([grad], max_norm)[0] for grad in _mean(_summed(micro))]] * len(micro)


def _per_element(micro: list[list[Grads]], max_norm: float) -> list[Grads]:
    return [[grad.clamp(-max_norm, max_norm) for grad in _mean(_summed(micro))]] * len(micro)


def _always_scales(micro: list[list[Grads]], max_norm: float) -> list[Grads]:
    mean = _mean(_summed(micro))
    return [[grad * (max_norm / _norm(mean)) for grad in mean]] * len(micro)


def _row(name: str, expected: str, cases: list[Case], holds: Callable[[Case], bool]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: (len(c.micro), len(c.micro[0])))
    seen = str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} updates"
    if broken and name == "the ranks synchronise once":
        seen = calls_text(broken[0].outcomes)
    return Row(name, not broken, expected, seen)


def _played(answer: Callable, draw: random.Random, clips: bool) -> Case:
    """One update on all ranks. `clips`: whether the mean gradient is longer than max_norm."""
    import torch

    ranks, N, shapes = draw.randint(2, 4), draw.randint(2, 4), [(3,), (2, 2), (4,)]

    def noise(shape: tuple[int, ...], scale: float) -> Tensor:
        return torch.tensor([draw.choice((-1, 1)) * draw.uniform(1, 2) * scale
                             for _ in range(torch.Size(shape).numel())]).view(shape)  # fmt: skip

    common = [noise(shape, 0.4 + place) for place, shape in enumerate(shapes)]
    apart = [[noise(shape, 3) for shape in shapes] for _ in range(ranks)]  # what the mean over ranks takes away
    middle = _mean(apart)
    micro = []
    for own in apart:
        whole = [(part + mine - mid) / N for part, mine, mid in zip(common, own, middle)]
        micro.append([[part + noise(tuple(part.shape), 1 / N) for part in whole] for _ in range(N)])
    locals_, mean = list(map(_norm, _summed(micro))), _norm(_mean(_summed(micro)))
    max_norm = draw.uniform(0.3, 0.5) * min(mean, *locals_) if clips else draw.uniform(1.03, 1.1) * mean

    def play(rank: int, exchange: Exchange) -> Grads:
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        for param in params:
            param.grad = torch.zeros_like(param)
        seen: list[Grads] = []

        def micro_step(i: int) -> None:
            for param, grad in zip(params, micro[rank][i]):
                param.grad = grad.clone() if param.grad is None else param.grad.add_(grad)

        def synchronise() -> None:
            parts = exchange([param.grad.clone() for param in params])
            for param, mean in zip(params, _mean(parts)):
                param.grad.copy_(mean)

        def step() -> None:
            seen.append([param.grad.clone() for param in params])

        call(answer, list(params), N, micro_step, synchronise, step, max_norm,
             shown=f"clipped_update(params, {N}, micro_step, synchronise, step, {max_norm:.3g}) on rank {rank}")
        if len(seen) != 1:
            raise Broke(f"step() was called {len(seen)} times on rank {rank} in one update; once is right")
        return seen[0]

    return Case(micro, max_norm, replay(play, ranks, depends=True))
