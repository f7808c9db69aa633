"""Several windows of a compressor with error feedback, played in one process, and the rules it may have followed.

What a rank sends is judged as the vector that it stands for. A rule says what it would have sent instead, so that a
mistake is recognised by its numbers, whatever the code looks like.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from course_lib.lab.guard import call

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("layer1.weight", "layer2.weight")
Micro = list["Tensor"]


class Sent(NamedTuple):
    """One parameter in one window: by rank, the gradients of its micro-steps, the messages and the vectors they stand
    for; and what each rank took for the mean."""

    window: int
    name: str
    micro: list[Micro]
    messages: list[Any]
    vectors: list[Tensor]
    means: list[Tensor]

    @property
    def mean(self) -> Tensor:
        return sum(self.vectors[1:], self.vectors[0]) / len(self.vectors)


@dataclass(frozen=True)
class Rule:
    """How a compressor goes on. `total(micro, left)` is what it compresses, `left(micro, left, total, sent, mean)` what
    it keeps, `key(name)` where."""

    quantise: Callable[[Tensor], Tensor]
    total: Callable[[Micro, Tensor], Tensor] = lambda micro, left: _sum(micro) + left
    left: Callable[..., Tensor] = lambda micro, left, total, sent, mean: total - sent
    key: Callable[[str], str] = lambda name: name

    def explains(self, history: list[Sent]) -> bool:
        """Whether every rank sent in every window what this rule sends."""
        kept: dict[tuple[str, int], Any] = defaultdict(float)
        for sent in history:
            keys = [(self.key(sent.name), rank) for rank in range(len(sent.micro))]
            totals = [self.total(micro, kept[key]) for key, micro in zip(keys, sent.micro)]
            vectors = [self.quantise(total) for total in totals]
            if not all(close(found, right) for found, right in zip(sent.vectors, vectors)):
                return False
            mean = _sum(vectors) / len(vectors)
            for key, micro, total, vector in zip(keys, sent.micro, totals, vectors):
                kept[key] = self.left(micro, kept[key], total, vector, mean)
        return True


def forgets(quantise: Callable[[Tensor], Tensor]) -> dict[str, Rule]:
    """The mistakes that every compressor can make with its residual."""
    return {
        "no_residual": Rule(quantise, left=lambda micro, left, total, sent, mean: 0.0),
        "forgets_old": Rule(quantise, left=lambda micro, left, total, sent, mean: _sum(micro) - sent),
        "residual_of_mean": Rule(quantise, left=lambda micro, left, total, sent, mean: total - mean),
        "keeps_sent": Rule(quantise, left=lambda micro, left, total, sent, mean: total),
        "wrong_sign": Rule(quantise, left=lambda micro, left, total, sent, mean: sent - total),
        "one_for_all": Rule(quantise, key=lambda name: ""),
        "only_the_last": Rule(quantise, total=lambda micro, left: micro[-1] + left),
        "residual_each_time": Rule(quantise, total=lambda micro, left: _sum([m + left for m in micro])),
    }


def played(make: Callable[[], Any], read: Callable[[Any, Tensor, str], Tensor], draw: random.Random, *, ranks: int,
           windows: int, numel: int, micro_steps: Callable[[], int], as_list: bool) -> list[Sent]:  # fmt: skip
    """`make()` builds a rank's compressor. `read(message, gradient, shown)` is the vector that a message stands for;
    it raises `Odd` where a message has not the right form. `as_list`: encode takes the micro-steps' gradients."""
    import torch

    each, history = [make() for _ in range(ranks)], []
    for window in range(windows):
        for name in NAMES:
            micro = [[_noise(draw, numel) for _ in range(micro_steps())] for _ in range(ranks)]
            messages, vectors = [], []
            for compressor, grads in zip(each, micro):
                given = [g.clone() for g in grads] if as_list else grads[0].clone()
                shown = f"encode({name!r}, …) in window {window + 1}"
                messages.append(call(compressor.encode, name, given, shown=shown))
                vectors.append(read(messages[-1], grads[0], shown))
            means = []
            for compressor in each:
                shown = f"decode({name!r}, …) in window {window + 1}"
                mean = call(compressor.decode, name, copy.deepcopy(messages), *([] if as_list else [numel]),
                            shown=shown)  # fmt: skip
                if not isinstance(mean, torch.Tensor) or mean.shape != (numel,):
                    raise Odd("decode returns the mean gradient", f"a tensor of {numel} entries",
                              f"{shown} gave {mean!r}", "no_result" if mean is None else "")  # fmt: skip
                means.append(mean.float().clone())
            history.append(Sent(window, name, micro, messages, vectors, means))
    return history


class Odd(Exception):
    """Something has not the right form: the row's name, what was expected, what was seen, the mistake."""

    def __init__(self, name: str, expected: str, seen: str, mistake: str = "") -> None:
        super().__init__(seen)
        self.name, self.expected, self.seen, self.mistake = name, expected, seen, mistake


def close(found: Tensor, right: Tensor) -> bool:
    import torch
    return torch.allclose(found.float(), right.float(), rtol=1e-3, atol=1e-4)


def short(x: Tensor) -> str:
    """The first numbers of a vector."""
    return "[" + ", ".join(f"{float(v):.3g}" for v in x[:6]) + (", …]" if len(x) > 6 else "]")


def _sum(parts: list) -> Any:
    return sum(parts[1:], parts[0])


def _noise(draw: random.Random, numel: int) -> Tensor:
    """Entries of many sizes, all different, around a mean that the ranks share in part."""
    import torch
    return torch.tensor([draw.gauss(0.3 * (i % 3 - 1), 1) * (1 + i % 5) for i in range(numel)])
