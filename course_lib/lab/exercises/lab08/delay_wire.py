"""The wire and the optimizer of exercise 8.2 in one process. Torch is imported where it is used: looking at a hint must
not load it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from course_lib.lab.offered import offers

if TYPE_CHECKING:
    from torch import Tensor


@offers("step", "zero_grad")
class Optimizer:
    """SGD of one parameter, which counts its steps."""

    def __init__(self, param: Tensor, lr: float, momentum: float, weight_decay: float) -> None:
        import torch
        self._sgd = torch.optim.SGD([param], lr=lr, momentum=momentum, weight_decay=weight_decay)
        self.steps = 0

    def step(self) -> None:
        self._sgd.step()
        self.steps += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._sgd.zero_grad(set_to_none)


@offers("launch")
class Wire:
    """Carries a gradient: until its wait() the memory holds nothing of use.

    `others[t]` is what the other ranks give in window t, added up. The check sets `call` to the window that runs.
    """

    def __init__(self, others: Sequence[Tensor], ranks: int) -> None:
        self.call, self.ranks, self.others = 0, ranks, others
        self.waited: list[int | None] = []

    def launch(self, gradient: Tensor) -> Handle:
        """Start the mean over ranks, in place."""
        import torch
        if not isinstance(gradient, torch.Tensor):
            raise ValueError(f"launch takes a gradient, not a {type(gradient).__name__}")
        if len(self.waited) == len(self.others):
            raise ValueError("launch was called more often than there are windows; the other ranks expect no more")
        self.waited.append(None)
        return Handle(self, len(self.waited) - 1, gradient)


@offers("wait", "is_completed")
class Handle:
    """Of one launch."""

    def __init__(self, wire: Wire, number: int, gradient: Tensor) -> None:
        self._wire, self._number, self._gradient, self._sent = wire, number, gradient, gradient.detach().clone()
        gradient.detach().fill_(float("nan"))

    def wait(self, timeout: object = None) -> bool:
        if self._wire.waited[self._number] is None:
            self._wire.waited[self._number] = self._wire.call
            others, ranks = self._wire.others[self._number], self._wire.ranks
            self._gradient.detach().copy_((self._sent + others) / ranks)
        return True

    def is_completed(self) -> bool:
        """Asking in a loop is waiting too."""
        return self.wait()
