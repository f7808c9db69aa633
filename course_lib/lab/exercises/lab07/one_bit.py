"""Exercise 7.2: one bit an entry, with error feedback.

The learner writes two methods; the cell of the exercise gives `__init__`:

    class OneBit:
        def __init__(self):
            self.residual = {}                     # name -> what was not sent yet

        def encode(self, name, gradients): ...     # (scale, positive)
        def decode(self, name, messages): ...      # the mean over ranks

`gradients` are those of the window's micro-steps. What travels of their sum plus the residual is one bool an entry and
one scale, the mean of the magnitudes. What that leaves is the next residual.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from course_lib.lab.exercises.lab07.feedback import NAMES, Odd, Rule, Sent, close, forgets, played, short
from course_lib.lab.guard import call
from course_lib.lab.model import Row, Verdict, exercise

if TYPE_CHECKING:
    from torch import Tensor

HINTS = (
    "Three steps in encode: what is there to send, what of it travels, what is left. Only the last of them changes "
    "`self.residual[name]`.",
    "Add up the gradients of the window and, once, the residual. The scale is the mean of the magnitudes of that "
    "total. What is left is the total minus scale where you send True, and plus scale where you send False. In decode "
    "every message has a scale of its own.",
    "total = sum(gradients) + self.residual.get(name, 0); scale, positive = total.abs().mean(), total > 0; "
    "self.residual[name] = total - torch.where(positive, scale, -scale). decode: the same torch.where for each "
    "message, added up, divided by len(messages).",
)

MISTAKES = {
    "no_result": "One of your methods returned None. Is there a `return` at its end?",
    "no_scale": "Your signs travel without a size: every entry counts as ±1, in a layer of tiny gradients as in one of "
    "large ones. Send the mean of the magnitudes, and multiply by it in decode.",
    "largest_scale": "Your scale is the largest magnitude. Then nearly every entry comes out too large. Of all scales, "
    "the mean of the magnitudes has the smallest squared error.",
    "no_residual": "What you send does not contain what was left of the windows before. Without it, small entries next "
    "to large ones are wrong in the same direction in every window, and training stalls.",
    "forgets_old": "You keep what is left of this window's gradient, and lose what was left before it. The residual is "
    "that of the *total*: gradient plus old residual, minus what was sent.",
    "residual_of_mean": "You subtract the mean over the ranks. Every rank keeps what is left of *its own* message: "
    "what the others sent was never missing here.",
    "keeps_sent": "Your residual is the whole total. What was sent must be taken out of it, or it is sent again.",
    "wrong_sign": "Your residual has the wrong sign: what was missing goes missing once more. It is the total minus "
    "what was sent, and it is added to the next gradient.",
    "one_for_all": "All parameters share one residual. Keep one under each name.",
    "only_the_last": "You send the gradient of the last micro-step only. The ones before it stayed at home under "
    "no_sync, and belong to the same window: add them up.",
    "residual_each_time": "You add the residual once for every micro-step. It was left over once, so it goes into the "
    "window once.",
    "own_scale": "You decode all messages with one scale. Every rank sent its own.",
    "never_divides": "decode returns the sum over ranks. Divide by the number of messages.",
}


@exercise("7.2", title="one bit an entry", minutes=10, needs="OneBit", hints=HINTS, mistakes=MISTAKES, kind="class")
def send_one_bit(answer: type, draw: random.Random) -> Verdict:
    """Rows over the first window, the next ones, windows of several micro-steps, and decode."""
    try:
        example = _example(answer)
        some, others = draw.sample((2, 3), 2)
        single = _history(answer, draw, some, lambda: 1)
        several = _history(answer, draw, others, lambda: draw.randint(2, 3))
    except Odd as odd:
        return Verdict((Row(odd.name, False, odd.expected, odd.seen),), odd.mistake)
    history = [*single, *several]
    first = [s for s in single if s.window == 0 and s.name == NAMES[0]]  # nothing was left before it
    rows = (
        example,
        _row("the first window", "mean magnitude, and the signs", first, Rule(quantised).explains(first)),
        _row("the windows after it", "gradient plus what was left", single, Rule(quantised).explains(single)),
        _row("windows of several micro-steps", "their sum, and the residual once", several,
             Rule(quantised).explains(several)),
        _decode_row(history),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(first, single, several))


def quantised(total: Tensor) -> Tensor:
    """±mean|total| by sign."""
    import torch
    scale = total.abs().mean()
    return torch.where(total > 0, scale, -scale)


def _mistake(first: list[Sent], single: list[Sent], several: list[Sent]) -> str:
    """The rule that explains what was sent; then what decode made of it."""
    import torch

    everything = [*single, *several]
    if not Rule(quantised).explains(first):
        if all(close(v.abs(), torch.ones_like(v)) for s in everything for v in s.vectors):
            return "no_scale"
        largest = all(close(v.abs(), micro[0].abs().max().expand(len(v)))
                      for s in first for v, micro in zip(s.vectors, s.micro))
        return "largest_scale" if largest else ""
    rules = forgets(quantised)
    if not Rule(quantised).explains(single):
        return next((name for name, rule in rules.items() if rule.explains(single)), "")
    if not Rule(quantised).explains(several):
        return next((name for name in ("only_the_last", "residual_each_time") if rules[name].explains(several)), "")
    ways = {
        "never_divides": lambda s: [s.mean * len(s.vectors)],
        "no_scale": lambda s: [_mean([v / v.abs() for v in s.vectors])],
        "own_scale": lambda s: [_mean([v.sign() * other.abs() for v in s.vectors]) for other in s.vectors],
    }
    return next((name for name, way in ways.items()
                 if all(any(close(mean, right) for right in way(s)) for s in everything for mean in s.means)), "")


def _example(answer: type) -> Row:
    import torch

    gradient = torch.tensor([3.0, -1.0, 0.5, -1.5])
    shown = "encode('weight', [tensor([3, -1, 0.5, -1.5])])"
    scale, positive = _parts(call(_made(answer).encode, "weight", [gradient.clone()], shown=shown), gradient, shown)
    held = abs(scale - 1.5) < 1e-4 and positive.tolist() == [True, False, True, False]
    return Row("the example of the text", held, "1.5, [True, False, True, False]",
               f"{shown} gave {scale:.4g}, {positive.tolist()}")  # fmt: skip


def _history(answer: type, draw: random.Random, ranks: int, micro_steps: Any) -> list[Sent]:
    return played(lambda: _made(answer), _read, draw, ranks=ranks, windows=4, numel=24, micro_steps=micro_steps,
                  as_list=True)  # fmt: skip


def _made(answer: type) -> Any:
    return call(answer, shown="OneBit()")


def _read(message: Any, gradient: Tensor, shown: str) -> Tensor:
    import torch
    scale, positive = _parts(message, gradient, shown)
    return torch.where(positive, scale, -scale)


def _parts(message: Any, gradient: Tensor, shown: str) -> tuple[float, Tensor]:
    import torch

    expected = f"(a number, a bool tensor of {len(gradient)} entries)"
    try:
        scale, positive = message
        scale = float(scale)
    except (TypeError, ValueError, RuntimeError):
        raise Odd("encode returns a scale and signs", expected, f"{shown} gave {message!r}",
                  "no_result" if message is None else "") from None  # fmt: skip
    if not isinstance(positive, torch.Tensor) or positive.dtype != torch.bool or positive.shape != gradient.shape:
        raise Odd("encode returns a scale and signs", expected, f"{shown} gave {positive!r} for the signs")
    return scale, positive


def _row(name: str, expected: str, history: list[Sent], ok: bool) -> Row:
    last = history[-1]
    return Row(name, ok, expected, f"held on {len(last.vectors)} ranks" if ok else
               f"{last.name} in window {last.window + 1}, rank 0: gradient {short(sum(last.micro[0]))} was sent as "
               f"{short(last.vectors[0])}")  # fmt: skip


def _decode_row(history: list[Sent]) -> Row:
    broken = [(s, m) for s in history for m in s.means if not close(m, s.mean)]
    seen = (f"{' and '.join(short(v[:3]) for v in broken[0][0].vectors)} gave {short(broken[0][1][:3])}" if broken else
            f"held in {len(history)} exchanges")  # fmt: skip
    return Row("decode", not broken, "the mean over ranks of what each sent", seen)


def _mean(vectors: list[Tensor]) -> Tensor:
    return sum(vectors[1:], vectors[0]) / len(vectors)
