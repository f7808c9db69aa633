"""DiLoCo: local steps of an inner optimizer, and an outer one that steps on how far the ranks have come."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim

from course_lib.train.local_sgd import LocalSGD, mean_over_ranks


class DiLoCo(LocalSGD):
    """`LocalSGD` whose rounds end in a step of an outer optimizer (Douillard et al., arXiv:2311.08105, algorithm 1).

    The outer gradient is Δ = θ_old − mean over ranks of θ_local, from the parameters at the start of the round to where
    the ranks are now: it points *against* the way they went, as a gradient does. SGD with Nesterov momentum steps from
    θ_old on it. `outer_lr=1, outer_momentum=0` is `LocalSGD`. The paper's values are 0.7 and 0.9, with AdamW inside,
    whose state stays each rank's own.

    The bytes are those of `LocalSGD`; θ_old and the outer momentum take twice the memory of the parameters. Every rank
    computes the same outer step.
    """

    def __init__(self, module: nn.Module, every: int = 8, outer_lr: float = 0.7, outer_momentum: float = 0.9,
                 process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(module, every, process_group=process_group, settings=(outer_lr, outer_momentum))
        self._old = [slot.param.detach().clone() for slot in self.slots]
        self.outer = optim.SGD(self._old, lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)

    @torch.no_grad()
    def _before_forward(self) -> None:
        super()._before_forward()
        if not self.local_windows and self.progress.forwards == 1:  # weights may have been loaded since the last round
            for old, slot in zip(self._old, self.slots):
                old.copy_(slot.param)

    @torch.no_grad()
    def _combine(self) -> None:
        for old, slot in zip(self._old, self.slots):
            old.grad = old - slot.param
        mean_over_ranks([old.grad for old in self._old], self.group)
        self.outer.step()
        self.outer.zero_grad()
        for old, slot in zip(self._old, self.slots):
            slot.param.copy_(old)

    def get_extra_state(self) -> dict[str, Any]:
        return super().get_extra_state() | {"old": {s.name: old.clone() for s, old in zip(self.slots, self._old)},
                                            "outer": copy.deepcopy(self.outer.state_dict())}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        super().set_extra_state(state)
        for slot, old in zip(self.slots, self._old):
            old.copy_(state["old"][slot.name])
        self.outer.load_state_dict(state["outer"])
