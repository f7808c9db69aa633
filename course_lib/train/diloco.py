"""DiLoCo: local steps of an inner optimizer, and an outer one that steps on how far the ranks have come."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim

from course_lib.train.local_sgd import LocalSGD, mean_over_ranks
from course_lib.train.saved import refuse_other, refuse_unlike, whose


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
        outer = copy.deepcopy(self.outer.state_dict())
        outer["state"] = {self.slots[i].name: kept for i, kept in outer["state"].items()}
        return super().get_extra_state() | {"old": {n: old.clone() for n, old in self._named_old()}, "outer": outer}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        super().set_extra_state(state)
        for name, old in self._named_old():
            old.copy_(state["old"][name])
        outer = copy.deepcopy(state["outer"])
        outer["state"] = {i: outer["state"][s.name] for i, s in enumerate(self.slots) if s.name in outer["state"]}
        self.outer.load_state_dict(outer)

    def _refuse(self, state: dict[str, Any]) -> None:
        super()._refuse(state)
        refuse_other(type(self).__name__, state, whose(self), old=dict, outer=dict)
        if state["outer"].keys() != self.outer.state_dict().keys():
            raise ValueError(f"the state is damaged: its outer optimizer has {sorted(state['outer'])}")
        olds = dict(self._named_old())
        refuse_unlike("the parameters at the start of the round", state["old"], olds)
        momentum = {name: kept["momentum_buffer"] for name, kept in state["outer"]["state"].items()
                    if kept.get("momentum_buffer") is not None}
        refuse_unlike("the outer momentum", momentum, olds, whole=bool(momentum))

    def _named_old(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((slot.name, old) for slot, old in zip(self.slots, self._old))
