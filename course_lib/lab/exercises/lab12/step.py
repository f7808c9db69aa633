"""Exercise 12.1: an optimizer whose state is spread over the ranks (ZeRO stage 1).

The learner writes two methods; the cell of the exercise gives the rest:

    class ShardedOptimizer:
        def __init__(self, flat, wire, make_optimizer):
            self.flat = flat                # all parameters, 1-D, whole and alike on every rank
            self.wire = wire                # wire.rank, wire.ranks, and two collectives that block and work in place
            ...                             # make_optimizer([tensor, …]) makes an optimizer

        def step(self, gradient, max_norm): ...

`gradient` is as long as `flat`. Segment `wire.rank` of `gradient.tensor_split(wire.ranks)` holds the mean over ranks,
and the others hold nothing of use: that is what a reduce-scatter leaves behind. `wire.all_reduce(tensor)` sums,
`wire.all_gather(flat)` brings every rank's own segment to all. Afterwards `flat` is what one process would have made of
the whole gradient, clipped by its norm. All ranks are played in one process, as in exercise 9.2.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from course_lib.lab.exercises.lab12.updates import Case, played
from course_lib.lab.guard import Broke
from course_lib.lab.model import Row, Verdict, exercise

HINTS = (
    "Which elements does this rank update? Only for these it needs a gradient, and only for these an optimizer state. "
    "What is then missing on this rank, and what does it not know about the gradient?",
    "The segment is a view, so an optimizer that steps it changes `flat` itself. The square of the whole norm is the "
    "sum of the squares of all segments: each rank squares its own, and all_reduce adds them up. Scale down if the "
    "norm is above max_norm, step, then all_gather.",
    "__init__: self.mine = flat.tensor_split(wire.ranks)[wire.rank]; self.optimizer = make_optimizer([self.mine]). "
    "step: g = gradient.tensor_split(self.wire.ranks)[self.wire.rank]; total = g.square().sum(); "
    "self.wire.all_reduce(total); self.mine.grad = g * min(1, max_norm / total.sqrt()); self.optimizer.step(); "
    "self.wire.all_gather(self.flat).",
)

MISTAKES = {
    "hangs": "A rank calls a collective that another does not. On a real wire it waits for ever. Collectives must not "
    "depend on what a rank sees of its own segment: whether to clip is decided after the all_reduce, with a norm that "
    "is the same everywhere.",
    "steps_everything": "Your optimizer holds more than this rank's segment, so its state takes as much memory as "
    "before. Give make_optimizer the segment only.",
    "reads_foreign": "NaN has come in. The other segments of `gradient` hold nothing of use after a reduce-scatter; "
    "take this rank's own, for the norm too.",
    "not_written_back": "`flat` is what it was before the step. The optimizer has updated something else, a copy of "
    "the segment. Let it step the view itself, or copy the result back before the gather.",
    "never_gathers": "This rank's segment is updated, and the others are old. The other ranks have updated those: "
    "bring them together at the end.",
    "gathers_too_early": "You gather before the step, so each rank sends what it had before: the others' segments "
    "are one update late, and the ranks compute with different models. Step first.",
    "clips_by_the_shard": "You clip by the norm of this rank's segment. It is smaller than the whole norm, and differs "
    "from rank to rank: segments are scaled by different factors, and the update points elsewhere. Sum the squares "
    "over the ranks first.",
    "adds_norms": "You add up norms. Not norms add up, but their squares: ‖g‖² = Σ‖gᵣ‖². Square, all_reduce, then take "
    "the root.",
    "averages_the_squares": "Your norm is too small by √n: you divide the sum of squares by the number of ranks. The "
    "segments are different parts of one gradient, so nothing is averaged.",
    "forgets_the_root": "You compare max_norm with the square of the norm. Take the root after the all_reduce.",
    "scales_up": "A gradient whose norm is below max_norm must stay as it is; yours is scaled up to it. The factor is "
    "at most 1.",
    "never_clips": "Nothing is clipped, or only after the step. Scale the gradient before the optimizer sees it.",
    "divides_again": "Your gradient is too small by the number of ranks. What the reduce-scatter left is the mean "
    "already.",
    "loses_the_state": "The first update is right, the second is made as if it were the first: its optimizer is a new "
    "one, without momentum. Make the optimizer once, in __init__.",
    "adds_to_the_last": "The first update is right, the second is made with the sum of both gradients. Replace `.grad` "
    "in each step.",
}


@exercise("12.1", title="shard the optimizer", minutes=10, needs="ShardedOptimizer", hints=HINTS, mistakes=MISTAKES,
          kind="class")  # fmt: skip
def shard_the_optimizer(answer: type, draw: random.Random) -> Verdict:
    """Rows over a dozen trainings of two updates, on one to five ranks, of sizes that they divide and do not."""
    if not callable(getattr(answer, "step", None)):
        raise Broke("the class has no method `step`")
    shapes = [(1, 6), (2, 8), (3, 9), (4, 8), (2, 7), (3, 8), (4, 3), (5, 12), (2, 2 * draw.randint(3, 9))]
    cases = [played(answer, Case.drawn(draw, n, size, clip)) for n, size in shapes for clip in (False, True)]
    several = [c for c in cases if c.ranks > 1]
    free, clipped = ([c for c in cases if c.clips == clips] for clips in (False, True))
    rows = (
        _row("all ranks call the same collectives", "nobody waits for ever", cases, lambda c: not c.waits),
        _row("the optimizer holds this rank's segment", "1/n of the elements", cases, lambda c: c.waits or c.sharded()),
        _row("the parameters are the same on all ranks", "equal to the bit", several, Case.alike),
        _row("without clipping: what one process has", "max_norm is above the norm", free, Case.right),
        _row("clipped by the norm of the whole gradient", "one factor for all segments", clipped, Case.right),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(cases))


def _mistake(cases: list[Case]) -> str:
    """The mistake that explains what is seen; the plainest one first, and the first update before the second."""
    several = [c for c in cases if c.ranks > 1 and c.full]
    if any(c.waits for c in several):
        return "hangs"
    if all(held >= c.size for c in several for held in c.held):
        return "steps_everything"
    if any(c.has_nan() for c in several):
        return "reads_foreign"
    if all(c.unchanged() for c in several):
        return "not_written_back"
    if not any(c.gathered or c.alike() for c in several):
        return "never_gathers"
    if all(c.late() for c in several):
        return "gathers_too_early"
    free, clipped = ([c for c in several if c.clips == clips] for clips in (False, True))
    if not all(c.right(updates=1) for c in free):
        ways = {"divides_again": lambda norms, n, limit: [1 / n] * n,
                "scales_up": lambda norms, n, limit: [limit / _whole(norms)] * n}  # fmt: skip
        named = (name for name, factors in ways.items() if all(c.gathered and c.matches(factors) for c in free))
        return next(named, "")
    if all(c.right(updates=1) for c in several):
        if all(c.adds_up() for c in free):
            return "adds_to_the_last"
        return "loses_the_state" if all(c.starts_anew() for c in several) else ""
    ways = {
        "clips_by_the_shard": lambda norms, n, limit: [_down(limit, norm) for norm in norms],
        "adds_norms": lambda norms, n, limit: [_down(limit, sum(norms))] * n,
        "averages_the_squares": lambda norms, n, limit: [_down(limit, _whole(norms) / n**0.5)] * n,
        "forgets_the_root": lambda norms, n, limit: [_down(limit, _whole(norms) ** 2)] * n,
        "never_clips": lambda norms, n, limit: [1.0] * n,
    }
    return next((name for name, factors in ways.items() if all(c.matches(factors) for c in clipped)), "")


def _whole(norms: list[float]) -> float:
    return sum(norm**2 for norm in norms) ** 0.5


def _down(limit: float, norm: float) -> float:
    return min(1.0, limit / norm) if norm else 1.0


def _row(name: str, expected: str, cases: list[Case], holds: Callable[[Case], bool]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: (c.ranks, c.size))
    seen = str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} trainings"
    return Row(name, not broken, expected, seen)
