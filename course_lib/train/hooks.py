"""What a strategy attaches to parameters and to optimizers, and takes off again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from course_lib.train.base import Strategy


class Slot:
    """One trainable parameter. A tied parameter has one slot, under its first name."""

    __slots__ = ("bit", "index", "name", "param")

    def __init__(self, index: int, name: str, param: nn.Parameter) -> None:
        self.index, self.name, self.param, self.bit = index, name, param, 1 << index


_live: weakref.WeakSet[Strategy] = weakref.WeakSet()


def attach(strategy: Strategy) -> Callable[[], None]:
    """Hook the parameters of `strategy`; close any older strategy that holds one of them. Returns what takes
    the hooks off. They also go when the strategy does."""
    for older in list(_live):
        if not older.ids.isdisjoint(strategy.ids):
            older.close()
    _live.add(strategy)
    handles = [handle for slot in strategy.slots for handle in _hooks(weakref.ref(strategy), slot, strategy.op)]
    return weakref.finalize(strategy, _remove, handles)


def _hooks(strategy: weakref.ref[Strategy], slot: Slot, op: str) -> Iterator[Any]:
    """Weak, so that a parameter does not keep an old wrapper alive."""
    def accumulated(_param: torch.Tensor) -> None:
        if (me := strategy()) is not None:
            me.accumulated(slot)

    def before(_grad: torch.Tensor) -> None:
        if (me := strategy()) is not None:
            me.unsum(slot)

    yield slot.param.register_post_accumulate_grad_hook(accumulated)
    if op == "sum":
        yield slot.param.register_hook(before)


def _remove(handles: list) -> None:
    for handle in handles:
        handle.remove()


def _guard(optimizer: Optimizer, _args: tuple, _kwargs: dict) -> None:
    """Before every optimizer step of this process: are the wrapped parameters it holds ready for it?"""
    for strategy in list(_live):
        held = (p for group in optimizer.param_groups for p in group["params"])
        if not strategy.closed and any(id(p) in strategy.ids for p in held):
            strategy.before_step(optimizer)


register_optimizer_step_pre_hook(_guard)
