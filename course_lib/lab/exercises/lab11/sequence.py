"""Exercise 11.2: the sequence-parallel pair.

The learner completes a class, one object on every rank:

- `SequenceParallelMLP(p, wire)` keeps both. `p` and `wire` are those of 11.1; `p.norm_weight` and `p.norm_bias` (width)
  are whole on every rank, as `p.down_bias` is.
- `forward(x)`: x is this rank's rows, (…, time/ranks, width); the result is its rows of x + mlp(norm(x)).
- `finish()` is called after backward, when every parameter has a `.grad`; afterwards the gradients of the whole
  parameters are those of one process, on every rank. `wire.all_reduce(tensor)` sums a tensor over the ranks, in place.
- Forward and backward a rank sends what one all-reduce would; norm and residual see its own rows only.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from course_lib.lab.exercises.lab11.mlp import CUT, Case, drawn, played, reference, refused, row
from course_lib.lab.guard import Broke
from course_lib.lab.model import Row, Verdict, exercise

HINTS = (
    "The norm works on each row by itself, so it may see a part of the rows. The matrices want all of them: what "
    "brings the rows together before `up`? After `down` every rank has a summand of *all* rows, and needs the sum of "
    "its own. And which parameters saw only a part of the rows?",
    "Norm on the own rows; all-gather of what it gives, whose way back is a reduce-scatter; up, GELU, down; "
    "reduce-scatter of the summands, whose way back is an all-gather; then bias and x. In finish: the gradients of "
    "norm_weight, norm_bias and down_bias know this rank's rows only.",
    'h = wire.cross(F.layer_norm(x, x.shape[-1:], p.norm_weight, p.norm_bias), "all_gather", "reduce_scatter"); y = '
    'wire.cross(F.linear(F.gelu(F.linear(h, p.up, p.up_bias)), p.down), "reduce_scatter", "all_gather"). finish: '
    "self.wire.all_reduce(param.grad) for the three parameters that are whole on every rank.",
)

MISTAKES = {
    "no_result": "forward returned None. Is there a `return` at its end?",
    "whole_parameters_partial": "The gradients of norm_weight, norm_bias and down_bias know this rank's rows only, and "
    "you leave them so. Every rank would then make another step with its copy, and the copies drift apart without any "
    "error. `finish` has to sum them.",
    "norm_forgotten": "The gradient of the norm's parameters knows this rank's rows only. Nothing raises an error: "
    "every rank would make another step with its copy of the norm, and the copies drift apart. Sum it in finish.",
    "bias_forgotten": "You sum the norm's gradients, and not that of down_bias. It too is added to this rank's rows "
    "only.",
    "sums_shards": "finish sums the gradients of up or down over the ranks. Those are gradients of *different* parts "
    "of the matrix, and each is already complete: its matmul saw all rows.",
    "finishes_twice": "The gradients of the whole parameters are `ranks` times what they should be: they are summed "
    "twice, on the way back and again in finish.",
    "takes_the_mean": "The gradients of the whole parameters are the mean over the ranks. Each rank has the part of "
    "its own rows, so they are summed.",
    "gathers_before_the_norm": "You gather x and normalise all rows. The numbers are right, and what sequence "
    "parallelism is for is lost: every rank again computes, and keeps, the norm of the whole sequence. Norm first.",
    "bias_p_times": "The bias of `down` is in every rank's summand, so the sum holds it once a rank. Add it after the "
    "reduce-scatter.",
    "no_residual": "x itself is missing from the output: the block is x + mlp(norm(x)).",
    "keeps_own_rows": "Every rank puts only its own rows through its part of the MLP. Then what the other ranks' "
    "hidden units make of these rows is missing. Bring all rows together before `up`.",
    "all_reduces": "You all-reduce the output and keep your own rows of it. A reduce-scatter gives just these, for "
    "half of the bytes.",
}

SHOWN, CLASS = "forward(x)", "SequenceParallelMLP"
WHOLE = ("norm_weight", "norm_bias", "down_bias")


@exercise("11.2", title="the sequence-parallel pair", minutes=12, needs=CLASS, hints=HINTS, mistakes=MISTAKES,
          kind="class")
def cut_the_sequence(answer: type, draw: random.Random) -> Verdict:
    """Rows over one to three ranks, with and without a batch dimension."""
    if missing := [name for name in ("forward", "finish") if not callable(getattr(answer, name, None))]:
        return Verdict((Row(f"has the method `{missing[0]}`", False, "forward(x) and finish()",
                            f"{answer.__name__} has no method `{missing[0]}`"),))  # fmt: skip
    cases = [played(drawn(draw, ranks, dims, block=True), answer) for ranks in (2, 3, 1) for dims in (2, 3)]
    if cases[0].broke:
        raise Broke(cases[0].broke)
    if odd := refused(cases, SHOWN):
        return Verdict((odd,), "no_result" if "gave None" in odd.seen else "")
    rows = (
        row("all ranks come to an end", "nobody waits for ever", cases, Case.ended, lambda c: ""),
        row("the output, on every rank", "its rows of x + mlp(norm(x))", cases, lambda c: c.output_is(c.y),
            lambda c: c.seen("y")),
        row("the gradient of x, on every rank", "its rows of the whole block's", cases, lambda c: c.right("x"),
            lambda c: c.seen("x")),
        row("the gradients of this rank's parts", "rows of up and up_bias, columns of down", cases,
            lambda c: c.right(*CUT), lambda c: c.seen(*CUT)),
        row("the gradients of what every rank holds", "norm_weight, norm_bias, down_bias: whole, on every rank", cases,
            lambda c: c.right(*WHOLE), lambda c: c.seen(*WHOLE)),
        row("the bytes of one all-reduce each way", "2(n−1)/n of all rows, and the small sums of finish", cases, _cheap,
            lambda c: f"rank 0 sent {c.sent():g} numbers, all rows are {c.x.numel()}"),
        row("the norm sees this rank's rows only", "what is gathered is normalised already", cases, _norm_first,
            lambda c: "x itself is gathered"),
    )  # fmt: skip
    return Verdict(rows, "" if all(each.ok for each in rows) else _mistake(cases))


def _cheap(c: Case) -> bool:
    small = 2 * len(WHOLE) * c.x.shape[-1]
    return c.sent() <= (c.ranks - 1) / c.ranks * (4 * c.x.numel() + small) + 1e-6


def _norm_first(c: Case) -> bool:
    return c.ranks == 1 or not any(call.tensor.equal(c.part("x", c.x, 0))
                                   for call in c.calls(op="all_gather", when="forward"))  # fmt: skip


def _mistake(cases: list[Case]) -> str:
    """The mistake that explains what is seen with several ranks; the plainest one first."""
    several = [c for c in cases if c.ranks > 1 and c.ended()]
    if not several:
        return ""

    def all_(holds: Callable[[Case], bool]) -> bool:
        return all(holds(c) for c in several)

    if not all_(lambda c: c.output_is(c.y)):
        if all_(lambda c: c.output_is(reference(c.x, **c.full, bias_times=c.ranks))):
            return "bias_p_times"
        if all_(lambda c: c.output_is(c.y - c.x)):
            return "no_residual"
        return "keeps_own_rows" if not any(c.calls(op="all_gather", when="forward") for c in several) else ""
    if any(c.calls(op="all_reduce", when="forward") for c in several):
        return "all_reduces"
    if not all_(_norm_first):
        return "gathers_before_the_norm"
    if not all_(lambda c: c.right(*CUT)):
        touched = any(call.tensor.shape in {c.part(name, c.full[name], 0).shape for name in CUT}
                      for c in several for call in c.calls(op="all_reduce", when="direct"))  # fmt: skip
        return "sums_shards" if touched else ""
    if all_(lambda c: any(c.gradient_is(name, c.ranks) for name in WHOLE)):
        return "finishes_twice"
    if all_(lambda c: any(_is_mean(c, name) for name in WHOLE)):
        return "takes_the_mean"
    wrong = {name for c in several for name in WHOLE if not c.gradient_is(name)}
    if not all_(lambda c: all(c.adds_up(name) for name in wrong)):
        return ""
    if wrong == set(WHOLE):
        return "whole_parameters_partial"
    if wrong == {"down_bias"}:
        return "bias_forgotten"
    return "norm_forgotten" if wrong and "down_bias" not in wrong else ""


def _is_mean(c: Case, name: str) -> bool:
    return c.gradient_is(name, 1 / c.ranks)
