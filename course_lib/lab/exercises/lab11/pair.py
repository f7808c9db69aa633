"""Exercise 11.1: the column/row pair.

The learner writes `parallel_mlp(x, p, wire)`; every rank calls it with the same x, (…, time, width):

- `p.up` (hidden/ranks, width) and `p.up_bias` (hidden/ranks) are this rank's part; so is `p.down` (width,
  hidden/ranks). `p.down_bias` (width) is whole on every rank.
- `wire.rank`, `wire.ranks`; `wire.cross(x, forward=op, backward=op)` gives the collective `forward` of x, and on the
  way back the collective `backward` of the gradient; an op is "all_reduce", "all_gather", "reduce_scatter" or None.
- The result is that of the MLP with GELU in one process, on every rank; so are the gradients of x and `down_bias`, and
  those of this rank's parts.
- One all-reduce's bytes forward, and one backward.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from course_lib.lab.exercises.lab11.mlp import CUT, Case, drawn, played, reference, refused, row
from course_lib.lab.guard import Broke
from course_lib.lab.model import Verdict, exercise

HINTS = (
    "Follow one hidden unit. Its row of `up` and its column of `down` are on one rank, so nothing has to move between "
    "the two matrices. What does each rank have after `down`? And on the way back: what does each rank know about the "
    "gradient of x?",
    "After `down` every rank has a summand of the output: forward it is summed; on the way back its gradient is "
    "already the same on every rank, so nothing moves. At x it is the other way round. A bias that every rank holds is "
    "added once, to the sum.",
    'x = wire.cross(x, backward="all_reduce"); h = F.gelu(F.linear(x, p.up, p.up_bias)); y = '
    'wire.cross(F.linear(h, p.down), forward="all_reduce"); and the bias of `down` is added to what that gives.',
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end?",
    "never_sums": "Every rank returns its own summand. A rank has a part of the hidden units; the output needs them "
    "all, so the ranks' products have to be summed.",
    "sums_hidden": "You all-reduce in both layers. The hidden units of two ranks are *different* units: they may not "
    "be added to each other. Column after row needs nothing between the two.",
    "sums_the_input": "You sum x over the ranks. It is the same on every rank already, so that makes `ranks` times x. "
    "Forward, nothing has to move there.",
    "bias_p_times": "The bias of `down` is in every rank's summand, so the sum holds it once a rank. Add it after the "
    "sum.",
    "bias_divided": "The bias is dealt out over the summands. That gives the right output, and each rank then finds "
    "only its part of the bias's gradient, so that the copies are updated too little, or apart. Add it once, after "
    "the sum.",
    "partial_input_gradient": "Forward is right. On the way back each rank finds, for x, only what went through its "
    "own hidden units. The gradient of x is the sum over the ranks, and the layer before needs it.",
    "sums_gradient_twice": "Forward is right. The gradient of the output is the same on every rank already; you sum it "
    "on the way back, and every gradient of the layer is then `ranks` times as large.",
    "takes_the_mean": "Your output is divided by the number of ranks. They hold summands of one output, not copies.",
    "sends_too_much": "The numbers are right, and the wire carries more than one all-reduce each way. Where do two "
    "collectives do what one would do?",
}

SHOWN = "parallel_mlp(x, p, wire)"


@exercise("11.1", title="the column/row pair", minutes=12, needs="parallel_mlp", hints=HINTS, mistakes=MISTAKES)
def column_and_row(answer: Callable, draw: random.Random) -> Verdict:
    """Rows over one to three ranks, with and without a batch dimension."""
    cases = [played(drawn(draw, ranks, dims, block=False), answer) for ranks in (2, 3, 1) for dims in (2, 3)]
    if cases[0].broke:
        raise Broke(cases[0].broke)
    if odd := refused(cases, SHOWN):
        return Verdict((odd,), "no_result" if "gave None" in odd.seen else "")
    rows = (
        row("all ranks come to an end", "nobody waits for ever", cases, Case.ended, lambda c: ""),
        row("the output, on every rank", "that of the whole MLP", cases, lambda c: c.output_is(c.y),
            lambda c: c.seen("y")),
        row("the gradient of x, on every rank", "that of the whole MLP", cases, lambda c: c.right("x"),
            lambda c: c.seen("x")),
        row("the gradients of this rank's parts", "rows of up and up_bias, columns of down", cases,
            lambda c: c.right(*CUT), lambda c: c.seen(*CUT)),
        row("the gradient of down_bias", "whole, on every rank", cases, lambda c: c.right("down_bias"),
            lambda c: c.seen("down_bias")),
        row("one all-reduce forward, one backward", "2(n−1)/n of x each way", cases, _cheap,
            lambda c: f"rank 0 sent {c.sent():g} numbers, x has {c.x.numel()}"),
    )  # fmt: skip
    return Verdict(rows, "" if all(each.ok for each in rows) else _mistake(cases))


def _cheap(c: Case) -> bool:
    return c.sent() <= 4 * (c.ranks - 1) / c.ranks * c.x.numel() + 1e-6


def _mistake(cases: list[Case]) -> str:
    """The mistake that explains what is seen with several ranks; the plainest one first."""
    several = [c for c in cases if c.ranks > 1 and c.ended()]
    if not several:
        return ""

    def all_(holds: Callable[[Case], bool]) -> bool:
        return all(holds(c) for c in several)

    def biased(c: Case):
        return reference(c.x, **c.full, bias_times=c.ranks)

    width = {id(c): c.x.shape[-1] for c in several}
    if any(call.tensor.shape[-1] != width[id(c)] for c in several for call in c.calls(when="forward")):
        return "sums_hidden"
    if all_(lambda c: c.output_is(biased(c))):
        return "bias_p_times"
    if all_(lambda c: c.output_is(c.y / c.ranks)):
        return "takes_the_mean"
    if not all_(lambda c: c.output_is(c.y)):
        if any(call.tensor.equal(c.x) for c in several for call in c.calls(op="all_reduce", when="forward")):
            return "sums_the_input"
        return "never_sums" if not any(c.calls(when="forward") for c in several) else ""
    if all_(lambda c: c.adds_up("down_bias")):
        return "bias_divided"
    if all_(lambda c: c.gradient_is("up", c.ranks)):
        return "sums_gradient_twice"
    if all_(lambda c: c.right(*CUT) and c.adds_up("x")):
        return "partial_input_gradient"
    return "sends_too_much" if all_(lambda c: c.right("x", *CUT, "down_bias")) else ""
