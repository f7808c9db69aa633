"""When the parameters of a sharded model are whole: gathered before use, some units ahead, and freed after it.

Gathers pair up across ranks by their order, so each pass over the model issues them in one order that does not depend
on what a rank computes: the order of registration in a forward pass, its reverse in a backward pass. A unit that is
used again after it was freed is gathered again, behind all others of the pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from course_lib.collectives.issue import lanes
from course_lib.launch.wire import Wire
from course_lib.train.sharded_unit import Unit


class Station:
    """A module and the units that are whole while it runs. The root's station is the parameters of no other."""

    def __init__(self, index: int, name: str, module: nn.Module, units: Sequence[Unit]) -> None:
        self.index, self.name, self.module, self.units = index, name, module, list(units)

    def free(self) -> None:
        for unit in self.units:
            unit.free()


class Gathers:
    """Gathers `stations` (the root first, then in order of registration), each `prefetch` stations before it is needed.
    With `keep`, what has been gathered stays until the optimizer steps, and all leave at once. `passed` is told
    of each station that backward has used and left."""

    def __init__(self, stations: Sequence[Station], prefetch: int, keep: bool,
                 passed: weakref.WeakMethod[Callable[[Station], None]]) -> None:
        self.stations, self._keep = list(stations), keep
        self._passed = passed
        self._ahead = len(self.stations) if keep else prefetch
        self._order: list[Station] = []  # of the pass that is under way
        self._next = 0  # what of it is to be issued next
        self.in_backward = False
        self._spent: set[int] = set()  # stations that this pass has used
        self.issued = 0
        """Which gathers were issued, in their order, as one number: the same on every rank, as long as they pair up."""
        self._detach = weakref.finalize(self, _remove, [
            handle for station in self.stations for handle in _hooks(weakref.ref(self), station.index, station.module)])

    def close(self) -> None:
        """Take the hooks off the modules, and leave every parameter whole."""
        self._detach()
        self.all()

    def invalidate(self) -> None:
        """The master weights are about to change: what has been gathered is old."""
        for station in self.stations:
            station.free()

    def all(self) -> None:
        """Gather everything and wait for it."""
        self.end_pass()
        for station in self.stations:
            self._gather(station)
        for unit in (unit for station in self.stations for unit in station.units):
            unit.wait()

    def used(self, station: Station) -> None:
        """This pass does not need a station any more. It is freed when the next is needed, because something in it may
        still be on its way through backward."""
        self._spent.add(station.index)

    def end_pass(self, kept: Sequence[Station] = ()) -> None:
        """Issue what is left of the pass, and free all but `kept`."""
        self.issue_rest()
        self.in_backward = False
        self._spent.clear()
        for station in self.stations:
            if not self._keep and station not in kept:
                station.free()

    def need(self, station: Station) -> None:
        """Return when the units of `station` are whole, with the next ones on their way."""
        if _in_backward() and not self.in_backward:
            self.in_backward = True
            self._begin(self.stations[:0:-1])
            Variable._execution_engine.queue_callback(self.end_pass)
        self._spent.discard(station.index)
        spent, self._spent = [self.stations[index] for index in self._spent], set()
        for other in spent:
            if not self._keep:
                other.free()
            if self.in_backward and (passed := self._passed()) is not None:
                passed(other)
        if station in self._order:
            self._issue(self._order.index(station) + 1 + self._ahead)
        if not all(unit.whole or unit.coming for unit in station.units):  # it was freed in this pass
            self.issue_rest()
            self._gather(station)
        for unit in station.units:
            unit.wait()

    def _begin(self, order: Sequence[Station]) -> None:
        self._order, self._next = list(order), 0

    def issue_rest(self) -> None:
        """Begin to gather what is left of the pass, so that all ranks have issued the same."""
        self._issue(len(self._order))

    def _issue(self, stop: int) -> None:
        """Gather the stations of the pass before place `stop`."""
        for station in self._order[self._next:stop]:
            self._gather(station)
        self._next = max(self._next, min(stop, len(self._order)))

    def _gather(self, station: Station) -> None:
        for unit in station.units:
            if unit.gather():
                self.issued = (self.issued * 1_000_003 + unit.index + 1) % 2**61

    def refuse_graph(self) -> None:
        if torch.is_grad_enabled() and not self._keep:
            raise RuntimeError("create_graph=True in ZeRO stage 3: a backward pass frees the parameters behind it, and "
                               "the derivative of this one would need them again; use stage 1 or 2 for a loss that "
                               "contains gradients")

    # hooks

    def before_forward(self, station: Station) -> None:
        if station.index == 0 and not _in_backward():
            self.end_pass(self.stations[:1] + self.stations[-1:])
            self._begin(self.stations)
        self.need(station)

    def after_forward(self, station: Station, output: Any) -> None:
        if _in_backward():  # a checkpoint's second forward: its backward comes next
            return
        if station.index == 0:
            self.end_pass(self.stations[:1] + self.stations[-1:])
        else:
            self.used(station)
        if not torch.is_grad_enabled():
            return
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise TypeError(f"{station.name or 'the model'} returned {type(output).__name__}, in which no tensor is "
                            "found, so its parameters could not be gathered for backward; return tensors, or tuples, "
                            "lists or dicts of tensors")
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(_needed(weakref.ref(self), station.index))

    @contextmanager
    def gathered(self) -> Iterator[None]:
        self.all()
        try:
            yield
        finally:
            self.end_pass()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _needed(gathers: weakref.ref[Gathers], index: int) -> Callable[[torch.Tensor], None]:
    def hook(_grad: torch.Tensor) -> None:
        if (me := gathers()) is not None:
            me.refuse_graph()
            me.need(me.stations[index])
    return hook


def _hooks(gathers: weakref.ref[Gathers], index: int, module: nn.Module) -> Iterator[Any]:
    """Weak, so that a module does not keep the shards of an old wrapper alive."""
    def mine(called: nn.Module) -> Gathers | None:
        """None for a copy of the module, which has a copy of its hooks."""
        me = gathers()
        return me if me is not None and me.stations[index].module is called else None

    def before(called: nn.Module, _inputs: Any) -> None:
        if (me := mine(called)) is not None:
            me.before_forward(me.stations[index])

    def after(called: nn.Module, _inputs: Any, output: Any) -> None:
        if (me := mine(called)) is not None:
            me.after_forward(me.stations[index], output)

    def saved(_module: nn.Module, _prefix: str, keep_vars: bool) -> None:
        if gathers() is not None and not keep_vars:  # with keep_vars, who asks wants to know which parameters there are
            raise RuntimeError("the parameters are spread over the ranks, and what is gathered is freed again: save "
                               "full_state_dict() of the wrapper, called on every rank")

    # before the module's own, which may use its parameters, as weight_norm's does
    yield module.register_forward_pre_hook(before, prepend=True)
    yield module.register_forward_hook(after)
    yield module.register_state_dict_pre_hook(saved)


def _remove(handles: list) -> None:
    for handle in handles:
        handle.remove()


_of_group: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def gathering(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The same ranks again, with a queue of their own: gathers fall between reductions in an order that may differ
    from rank to rank. What they send counts in `traffic` of `group`. Made once a group."""
    if group not in _of_group:
        other = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
        if isinstance(group, Wire):
            other.queue, other.traffic = "gather", group.traffic
        else:
            lanes[other] = "gather"
        _of_group[group] = other
    return _of_group[group]
