"""Exercise 7.3: the largest entries, and where they lie.

The learner writes two methods; the cell of the exercise gives `__init__`:

    class TopK:
        def __init__(self, k):
            self.k = k                                 # the share of entries that travels, 0.01 is 1 %
            self.residual = {}                         # name -> what was not sent yet

        def encode(self, name, gradient): ...          # (values, places)
        def decode(self, name, messages, numel): ...   # the mean over ranks, 1-D of length numel

`max(1, round(k * numel))` entries of gradient plus residual travel, those of the largest magnitude; every rank chooses
its own.
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
    "The same three steps as in 7.2: what is there to send, what of it travels, what is left. What travels now needs "
    "two tensors: values, and the places they belong to.",
    "`x.abs().topk(count).indices` are the places of the largest magnitudes; the values are x at these places, with "
    "their signs. The residual is x with zeros there. In decode begin with zeros, and *add* what each rank sent at its "
    "own places.",
    "encode: x = gradient + self.residual.get(name, 0); places = x.abs().topk(max(1, round(self.k * len(x)))).indices; "
    "values = x[places]; x = x.clone(); x[places] = 0; self.residual[name] = x. decode: out = zeros(numel); for each "
    "message out[places] += values; return out / len(messages).",
)

MISTAKES = {
    "no_result": "One of your methods returned None. Is there a `return` at its end?",
    "k_as_count": "You take k for a number of entries. It is a share: 0.01 of 100 000 entries are 1000.",
    "not_rounded": "You send one entry more or fewer than `round(k * len)` says. int() cuts off what follows the "
    "point, ceil() always goes up: round.",
    "nothing_of_small": "From a small parameter you send nothing, so it never learns. Send one entry at least.",
    "by_value": "You send the largest values. Large negative entries count as much: choose by magnitude.",
    "loses_sign": "You send magnitudes. Choose the places by magnitude, then send the entries themselves.",
    "no_residual": "What you send does not contain what was left before. An entry that is never among the largest is "
    "then never sent, however often it asks.",
    "forgets_old": "You keep what is left of this gradient, and lose what was left before it. Keep what is left of the "
    "sum of both.",
    "keeps_sent": "Your residual keeps the entries that were sent, so they are sent again and again. Set them to zero.",
    "wrong_sign": "Your residual has the wrong sign: what was missing goes missing once more. It is the total with "
    "zeros at the places that were sent, and it is added to the next gradient.",
    "residual_of_mean": "You subtract the mean over the ranks. Every rank keeps what *it* did not send.",
    "one_for_all": "All parameters share one residual. Keep one under each name.",
    "own_places": "You put the other ranks' values where one rank's values belong. Every rank chose other places: use "
    "those that came with the values.",
    "overwrites": "Where two ranks chose the same place, one value replaces the other. Add them.",
    "never_divides": "decode returns the sum over ranks. Divide by the number of messages.",
}
SHARE, SIZES, FEW = 0.15, (22, 18), 3
"""3.3 and 2.7 entries travel, both to be rounded to 3, and of the few less than half a one."""


@exercise("7.3", title="the largest entries", minutes=10, needs="TopK", hints=HINTS, mistakes=MISTAKES, kind="class")
def send_the_largest(answer: type, draw: random.Random) -> Verdict:
    """Rows over the first window, the next ones, a parameter of few entries, and decode."""
    try:
        example = _example(answer)
        some, others = draw.sample((2, 3), 2)
        runs = [_history(answer, draw, ranks, numel) for ranks, numel in zip((some, others), SIZES)]
        small = _history(answer, draw, draw.choice((some, others)), FEW)
    except Odd as odd:
        return Verdict((Row(odd.name, False, odd.expected, odd.seen),), odd.mistake)
    history = [sent for run in runs for sent in run]
    first = [s for s in history if s.window == 0 and s.name == NAMES[0]]  # nothing was left before it
    rows = (
        example,
        _row("how many travel", ", ".join(f"{_count(n)} of {n}" for n in (*SIZES, FEW)), [*small, *history], _count_ok),
        _row("the first window", "the entries of the largest magnitude", first, lambda s: _right.explains([s])),
        _row("the windows after it", "gradient plus what was left", [*small, *history][::-1],
             lambda s: all(map(_right.explains, (*runs, small)))),
        _row("decode", "the mean over ranks, each entry in its place", [*history, *small],
             lambda s: all(close(mean, s.mean) for mean in s.means)),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(first, runs, small))


def quantised(x: Tensor) -> Tensor:
    """x with zeros everywhere but at its largest magnitudes."""
    import torch
    places = x.abs().topk(_count(len(x))).indices
    return torch.zeros_like(x).index_copy(0, places, x[places])


_right = Rule(quantised)


def _count(numel: int) -> int:
    return max(1, round(SHARE * numel))


def _count_ok(sent: Sent) -> bool:
    return all(len(values) == _count(len(vector)) for (values, _), vector in zip(sent.messages, sent.vectors))


def _mistake(first: list[Sent], runs: list[list[Sent]], small: list[Sent]) -> str:
    """The rule that explains what was sent; then what decode made of it."""
    history = [sent for run in runs for sent in run]
    if not all(map(_count_ok, history)):
        counts = [(len(values), len(s.micro[0][0])) for s in history for values, _ in s.messages]
        if all(count in (0, 1) for count, _ in counts):
            return "k_as_count"
        return "not_rounded" if all(abs(count - _count(numel)) < 2 for count, numel in counts) else ""
    if not all(_right.explains([s]) for s in first):
        for name, wrong in (("by_value", _largest_values), ("loses_sign", lambda x: quantised(x).abs())):
            if all(Rule(wrong).explains([s]) for s in first):
                return name
        return ""
    if not all(map(_right.explains, runs)):
        return next((name for name, rule in forgets(quantised).items() if all(map(rule.explains, runs))), "")
    if not all(map(_count_ok, small)):
        return "nothing_of_small"
    ways = {"never_divides": lambda s: [s.mean * len(s.vectors)], "own_places": _own_places,
            "overwrites": lambda s: [_overwritten(s.vectors, 1), _overwritten(s.vectors, len(s.vectors))]}  # fmt: skip
    return next((name for name, way in ways.items()
                 if all(any(close(mean, right) for right in way(s)) for s in history for mean in s.means)), "")


def _largest_values(x: Tensor) -> Tensor:
    import torch
    places = x.topk(_count(len(x))).indices
    return torch.zeros_like(x).index_copy(0, places, x[places])


def _own_places(sent: Sent) -> list[Tensor]:
    """Each rank's places for the values of all."""
    import torch
    out = []
    for _, places in sent.messages:
        total = torch.zeros_like(sent.vectors[0])
        for values, _ in sent.messages:
            total.index_add_(0, places.long(), values.float())
        out.append(total / len(sent.messages))
    return out


def _overwritten(vectors: list[Tensor], ranks: int) -> Tensor:
    """The last rank that sent an entry has it alone."""
    import torch
    out = torch.zeros_like(vectors[0])
    for vector in vectors:
        out = torch.where(vector != 0, vector, out)
    return out / ranks


def _example(answer: type) -> Row:
    import torch

    gradient = torch.tensor([0.5, -4.0, 1.0, 3.0])
    shown = "TopK(0.5).encode('weight', tensor([0.5, -4, 1, 3]))"
    message = call(call(answer, 0.5, shown="TopK(0.5)").encode, "weight", gradient.clone(), shown=shown)
    found = _read(message, gradient, shown)
    return Row("the example of the text", close(found, torch.tensor([0.0, -4.0, 0.0, 3.0])),
               "-4 and 3, at 1 and 3", f"{shown} gave {message}")  # fmt: skip


def _history(answer: type, draw: random.Random, ranks: int, numel: int) -> list[Sent]:
    return played(lambda: call(answer, SHARE, shown=f"TopK({SHARE})"), _read, draw, ranks=ranks, windows=4, numel=numel,
                  micro_steps=lambda: 1, as_list=False)  # fmt: skip


def _read(message: Any, gradient: Tensor, shown: str) -> Tensor:
    """The message as a vector."""
    import torch

    expected = "(values, places), two tensors of one length, no place twice"
    try:
        values, places = message
        fits = values.shape == places.shape == (len(places),) and len(set(places.tolist())) == len(places)
        fits &= all(0 <= place < len(gradient) for place in places.tolist()) and not places.is_floating_point()
    except (TypeError, ValueError, AttributeError):
        fits = False
    if not fits:
        raise Odd("encode returns values and places", expected, f"{shown} gave {message!r}",
                  "no_result" if message is None else "")  # fmt: skip
    return torch.zeros_like(gradient).index_copy(0, places.long(), values.to(gradient.dtype))


def _row(name: str, expected: str, history: list[Sent], holds: Any) -> Row:
    broken = [s for s in history if not holds(s)]
    seen = _sent_text(broken[0]) if broken else f"held in {len(history)} exchanges"
    return Row(name, not broken, expected, seen)


def _sent_text(sent: Sent) -> str:
    values, places = sent.messages[0]
    return (f"{sent.name} in window {sent.window + 1}, rank 0: gradient {short(sent.micro[0][0])} of "
            f"{len(sent.micro[0][0])} sent {short(values)} at {places.tolist()}; mean {short(sent.means[0])}")
