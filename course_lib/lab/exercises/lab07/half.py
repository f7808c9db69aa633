"""Exercise 7.1: half precision on the wire.

The learner writes two methods:

    class Half:
        def encode(self, gradient, ranks): ...    # what this rank puts on the wire, float16
        def decode(self, total, ranks): ...       # float32, the mean over ranks

The wire adds up in float16 what all ranks put on it. The division by the number of ranks comes before the cast, and
nothing else scales: the result is right where the sum, or one rank's gradient, does not fit into float16 but its part
of the mean does, and as right as float16 can be where all are small.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

from course_lib.lab.guard import call
from course_lib.lab.model import Row, Verdict, exercise

if TYPE_CHECKING:
    from torch import Tensor

HINTS = (
    "float16 ends at 65504. Which numbers of this exchange can be larger, although the mean is not?",
    "Divide by the number of ranks before anything else, while the gradient still is float32. Then neither the cast "
    "nor the sum can leave the range, and nothing is left to divide at the end.",
    "encode: return (gradient / ranks).to(torch.float16). decode: return total.to(torch.float32).",
)

MISTAKES = {
    "no_result": "One of your methods returned no tensor. Is there a `return` at its end?",
    "sends_float32": "What you put on the wire has 4 bytes an entry, as before. Cast it to torch.float16.",
    "bfloat16": "You send bfloat16. It has the range of float32, but keeps 8 bits of a number, where float16 keeps 11. "
    "Here float16 is asked for.",
    "stays_half": "What you return is still float16. The optimizer works on float32: cast it back.",
    "divides_after": "You divide after the sum. The wire adds in float16, and a sum above 65504 is infinite there, "
    "although the mean is not. Divide before you send.",
    "casts_first": "You cast before you divide. A single gradient above 65504 becomes infinite in the cast. Divide in "
    "float32, then cast.",
    "never_divides": "You return the sum over ranks. Divide by their number, before you send.",
    "divides_twice": "You divide by the number of ranks twice: once in encode, once in decode.",
    "underflows": "You make the numbers smaller than they have to be. Below 6e-5 float16 loses digit after digit, and "
    "gradients are often that small. Divide by the number of ranks, and by nothing else.",
}


class Case(NamedTuple):
    """One exchange: every rank's gradient, what each sent, the sum on the wire, and what came out."""

    gradients: list[Tensor]
    sent: list[Tensor]
    got: Tensor

    @property
    def mean(self) -> Tensor:
        return sum(g.double() for g in self.gradients) / len(self.gradients)

    def is_(self, right: Tensor) -> bool:
        """Within what float16 can tell apart."""
        ranks, largest = len(self.gradients), max(float(g.abs().max()) for g in self.gradients)
        return bool(((self.got.double() - right).abs() <= 2e-3 * ranks * largest + 1e-7).all())

    @property
    def ok(self) -> bool:
        return self.is_(self.mean)

    def __str__(self) -> str:
        place = int((self.got.double() - self.mean).abs().nan_to_num(float("inf")).argmax())
        given = " and ".join(f"{float(g[place]):.6g}" for g in self.gradients)
        return f"{given} gave {float(self.got[place]):.6g}; their mean is {float(self.mean[place]):.6g}"


@exercise("7.1", title="half precision", minutes=5, needs="Half", hints=HINTS, mistakes=MISTAKES, kind="class")
def send_half(answer: type, draw: random.Random) -> Verdict:
    """Rows over gradients of ordinary size, of a size whose sum overflows, of one that overflows alone, and of small
    ones."""
    cases: dict[str, list[Case]] = {"plain": [], "sum": [], "alone": [], "small": []}
    for kind, played in cases.items():
        for ranks in (2, 3, 4):
            case = _played(answer, _gradients(draw, kind, ranks), ranks)
            if isinstance(case, Verdict):
                return case
            played.append(case)
    rows = (
        _row("the mean over ranks", "as near as float16 can say it", cases["plain"]),
        _row("a sum above 65504", "the mean, which fits", cases["sum"]),
        _row("one gradient above 65504", "the mean, which fits", cases["alone"]),
        _row("gradients near 1e-4", "as near as float16 can say it", cases["small"]),
    )
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(cases))


def _mistake(cases: dict[str, list[Case]]) -> str:
    plain = cases["plain"]
    if not all(c.ok for c in plain):
        if all(c.is_(c.mean * len(c.gradients)) for c in plain):
            return "never_divides"
        return "divides_twice" if all(c.is_(c.mean / len(c.gradients)) for c in plain) else ""
    if any(bool(c.got.isinf().any()) for c in cases["sum"]):
        return "divides_after"
    if any(bool(s.isinf().any()) for c in cases["alone"] for s in c.sent):
        return "casts_first"
    return "underflows" if all(c.ok for kind in ("sum", "alone") for c in cases[kind]) else ""


def _row(name: str, expected: str, cases: list[Case]) -> Row:
    broken = [c for c in cases if not c.ok]
    return Row(name, not broken, expected, str(broken[0]) if broken else f"held on {len(cases)} numbers of ranks")


def _gradients(draw: random.Random, kind: str, ranks: int) -> list[Tensor]:
    """Five entries a rank. `sum`: each fits, two together do not. `alone`: the first of one rank does not fit.
    `small`: a thousandth of any loses digits."""
    import torch

    if kind == "sum":
        return [torch.tensor([draw.uniform(34_000, 60_000) for _ in range(5)]) for _ in range(ranks)]
    size = 2e-4 if kind == "small" else 1.0
    gradients = [torch.tensor([draw.choice((-1, 1)) * draw.uniform(0.5, 2) * size for _ in range(5)])
                 for _ in range(ranks)]  # fmt: skip
    if kind == "alone":
        gradients[draw.randrange(ranks)][0] = draw.uniform(70_000, 100_000)
    return gradients


def _played(answer: type, gradients: list[Tensor], ranks: int) -> Case | Verdict:
    """All ranks encode, the wire adds, rank 0 decodes; a verdict where something has not the right form."""
    import torch

    half, sent = call(answer, shown="Half()"), []
    for gradient in gradients:
        shown = f"encode({_short(gradient)}, {ranks})"
        message = call(half.encode, gradient.clone(), ranks, shown=shown)
        if not isinstance(message, torch.Tensor) or message.dtype != torch.float16 or message.shape != gradient.shape:
            expected = f"a float16 tensor of {len(gradient)}"
            return _form("encode returns the gradient in float16", expected, shown, message)
        sent.append(message.clone())
    total = sent[0].clone()
    for message in sent[1:]:
        total += message
    shown = f"decode({_short(total)}, {ranks})"
    got = call(half.decode, total.clone(), ranks, shown=shown)
    if not isinstance(got, torch.Tensor) or got.dtype != torch.float32 or got.shape != total.shape:
        return _form("decode returns the mean in float32", f"a float32 tensor of {len(total)}", shown, got)
    return Case(gradients, sent, got)


def _form(name: str, expected: str, shown: str, found: object) -> Verdict:
    """The row of an answer whose form is wrong, and what it tells."""
    import torch

    dtype = getattr(found, "dtype", None)
    sending = name.startswith("encode")
    told = {(True, torch.float32): "sends_float32", (True, torch.bfloat16): "bfloat16",
            (False, torch.float16): "stays_half"}  # fmt: skip
    mistake = told.get((sending, dtype), "") if dtype is not None else "no_result" if found is None else ""
    seen = f"{dtype} of {tuple(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
    return Verdict((Row(name, False, expected, f"{shown} gave {seen}"),), mistake)


def _short(x: Tensor) -> str:
    return "[" + ", ".join(f"{float(v):.4g}" for v in x) + "]"
