"""ZeRO: optimizer state, gradients and parameters spread over the ranks instead of copied to each."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from course_lib.train.base import Strategy
from course_lib.train.clip import clip_grad_norm
from course_lib.train.control import Absent, SynchronizationError
from course_lib.train.hooks import Slot
from course_lib.train.sharded_gather import Gathers, Station, gathering
from course_lib.train.sharded_layout import checked, layers, stations
from course_lib.train.sharded_marks import Marks
from course_lib.train.sharded_reduce import Reductions
from course_lib.train.sharded_state import WholeStates
from course_lib.train.sharded_unit import Unit
from course_lib.train.status import Call


class Sharded(WholeStates, Strategy):
    """Each of n ranks keeps 1/n of the optimizer state (`stage=1`), of the gradient too (2), of the parameters too (3)
    (Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020).

        model = Sharded(module, stage=3)
        optimizer = AdamW(model.shards())
        accumulate(model, window, loss_of, counts=counts, every=True)    # stage 1: without `every`
        model.clip_grad_norm(1.0)    # nn.utils.clip_grad_norm_(model.parameters()) finds no gradient, and is refused
        optimizer.step()
        optimizer.zero_grad()

    The optimizer holds `shards()`: this rank's part of every parameter, 1-D, in float32 at least, possibly without
    elements. After its step the parameters are gathered anew, in their own dtype, under the next forward.
    A loss scaler has to be torch's `ShardedGradScaler`: an overflow may lie in one rank's shard alone.

    A *unit* is gathered, and its gradient reduced, as one. `units` names modules; by default they are the members of
    the model's outermost lists and sequences. All other parameters, and those that two units share, form one unit that
    is whole from the beginning of forward to the end of backward. A parameter that is not gathered has no elements, so
    outside its module's forward it cannot be used: read parameters inside `with model.gathered()`.

    Gradients are reduce-scattered under backward, in float32 at least, in the reverse order of the units. Bytes that a
    rank sends in a window of N micro-steps, with P bytes of parameters, G of gradients and (n−1)/n in front of each:
    stage 1 G + P; stage 2 N·G + P; stage 3 N·G + about 2N·P, because the parameters are gathered for every forward and,
    but for the root's and the last unit's, for every backward. With `prefetch` units ahead (stage 3; the others gather
    all at once) the gathers travel under compute.

    Stage 1 keeps the whole gradient, so micro-steps can run under `no_sync()`. In stages 2 and 3 that would bring the
    whole gradient back into memory, and `no_sync()` is refused, unless `whole_gradients=True` says that this is meant;
    gradients then travel once a window.

    Otherwise the gradient of one unit travels while that of the next is computed, and is waited for before the next
    leaves, so every parameter must get one in every backward. `find_unused=True` allows that some do not, and lets all
    units travel at once, since a rank cannot know what the others still wait for.
    """

    moves_parameters = True

    def __init__(self, module: nn.Module, stage: int, units: Sequence[str] | None = None, prefetch: int = 1,
                 find_unused: bool = False, whole_gradients: bool = False, op: str = "mean",
                 process_group: dist.ProcessGroup | None = None) -> None:
        if stage not in (1, 2, 3):
            raise ValueError(f"stage={stage!r}: choose 1 (optimizer state), 2 (and gradients) or 3 (and parameters)")
        if compiled := [n or type(m).__name__ for n, m in module.named_modules()
                        if hasattr(m, "_orig_mod") or m._compiled_call_impl is not None]:
            raise ValueError(f"{compiled[0]!r} is compiled, and what is compiled does not gather its parameters; wrap "
                             "the module as it was before torch.compile()")
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch}: give the units to gather ahead, 0 or more")
        super().__init__(module, op=op, process_group=process_group)
        self.stage, self.find_unused, self.whole_gradients = stage, find_unused, whole_gradients or stage == 1
        names = list(layers(module)) if units is None else checked(module, units)
        self._start(stage, names, prefetch, find_unused, whole_gradients)
        places = stations(module, names, self.slots, self.group, gathering(self.group), release=stage == 3)
        self.units = [unit for place in places for unit in place.units]
        self._home = {slot.index: (unit, place) for place in places for unit in place.units for slot in unit.slots}
        self.ids |= {id(piece) for piece in self.shards()}
        self.gathers = Gathers(places, prefetch, stage < 3, weakref.WeakMethod(self._passed))
        in_turn = not (find_unused or self.whole_gradients)  # there is memory to save by waiting
        self._reductions = Reductions(self.units, op, in_turn, keep=stage == 1)
        self._marks = Marks(self.units)
        self._unwanted: list[tuple[Unit, int]] = []
        self._dropped = 0  # parameters whose gradient was dropped in this window, and that have no new one
        self._begin_backward()

    # the training loop's side

    def shards(self) -> list[nn.Parameter]:
        """What the optimizer holds, the same list on every rank but for the sizes."""
        return [piece for _, piece in self.named_shards()]

    def named_shards(self) -> Iterator[tuple[str, nn.Parameter]]:
        for unit in self.units:
            for slot, piece in zip(unit.slots, unit.pieces):
                yield slot.name, piece

    def no_sync(self) -> AbstractContextManager[None]:
        if not self.whole_gradients:
            raise RuntimeError(f"no_sync() in ZeRO stage {self.stage} would keep the whole gradient on every rank; "
                               "leave it out (accumulate(…, every=True)), which adds up sharded gradients, or accept "
                               "the memory with whole_gradients=True")
        return super().no_sync()

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """As `clip.clip_grad_norm`, by the norm over the shards of all ranks. Collective call."""
        return clip_grad_norm(self.shards(), max_norm, shards=self.group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As an optimizer's: between two backward passes it drops what is on its way too."""
        for piece in self.shards():
            if piece.grad is not None:
                piece.grad = None if set_to_none else piece.grad.zero_()

    def gathered(self) -> AbstractContextManager[None]:
        """Inside the block every parameter is whole. Collective call; changes made inside are lost."""
        return self.gathers.gathered()

    def __getstate__(self) -> Any:
        raise TypeError("the parameters are spread over the ranks and cannot be copied or pickled with their wrapper; "
                        "save full_state_dict(), called on every rank")

    def close(self) -> None:
        """As for any strategy, and before something else wraps the module. Every rank calls it, because the parameters
        are gathered and stay whole."""
        if not self.closed:
            self.gathers.close()
        super().close()

    # what happens when

    def before_step(self, optimizer: Optimizer) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(id(slot.param) in held for slot in self.slots):
            raise RuntimeError(f"this {type(optimizer).__name__} holds the module's parameters, which are spread over "
                               "the ranks; give it model.shards()")
        super().before_step(optimizer)
        self.gathers.invalidate()  # an evaluation since may have gathered

    def _agree(self, call: Call) -> None:
        self._drop()
        self.progress.left(self.gathers.issued)
        try:
            super()._agree(call)
        except Absent as error:
            mine = self.progress
            raise SynchronizationError(
                f"{error} Or they wait inside a forward or backward pass that rank {dist.get_rank()} left out, which "
                f"ran {mine.forwards} forward and {mine.backwards} backward passes in window {self.window}: in ZeRO "
                "every rank must run all of them, with a loss of 0 where there is nothing to learn") from error

    def _before_forward(self) -> None:
        if self.gathers.in_backward:
            self._complete_broken_backward()
        self._drop()
        self._settle()
        self._begin_backward()
        super()._before_forward()

    def _complete_broken_backward(self) -> None:
        """The last backward raised, perhaps before any gradient, and the others wait for what it left out."""
        progress = self.progress
        if not progress.in_backward:
            progress.in_backward, progress.running = True, progress.armed
            self._reductions.begin()
        self.gathers.issue_rest()
        if progress.running:
            self._reductions.rest()
        self.gathers.end_pass()

    def _before_synchronised_backward(self) -> None:
        self._reductions.begin()

    def _gradient_ready(self, slot: Slot) -> None:
        if self._first:
            self._first = False
            self._drop()
            self._settle()
            self.progress.seen |= slot.bit
        self._dropped &= ~slot.bit
        unit, station = self._home[slot.index]
        unit.waiting -= 1
        if station.index and not any(other.waiting for other in station.units):
            self.gathers.used(station)

    def _passed(self, station: Station) -> None:
        """Backward has gone on from a station whose gradients are all there."""
        self._reductions.ready(station.units, self.progress.running)

    def _after_synchronised_backward(self) -> None:
        self._reductions.rest()

    def _end_backward(self) -> None:
        super()._end_backward()
        for unit in self.units:
            unit.collect()
        self._begin_backward()
        self._marks.set()

    def _begin_backward(self) -> None:
        self._first = True
        self._reductions.forget_ready()
        for unit in self.units:
            unit.waiting = len(unit.slots)

    def _drop(self) -> None:
        """Note what the training loop has dropped since the last backward pass."""
        for unit, at, zeroed in self._marks.dropped():
            self._unwanted.append((unit, at))
            if not zeroed and self.find_unused:
                self.progress.seen &= ~unit.slots[at].bit
            elif not zeroed:
                self._dropped |= unit.slots[at].bit

    def _settle(self) -> None:
        """Zero what was dropped, sent or not. Waits for what is on its way."""
        if self._unwanted:
            self._reductions.arrive()
        for unit, at in self._unwanted:
            unit.drop(at)
        self._unwanted.clear()

    @torch.no_grad()
    def _finish(self) -> None:
        self._reductions.finish()
        self._settle()
        self._marks.clear()
        for unit in self.units:
            for slot, piece, grad in zip(unit.slots, unit.pieces, unit.cut(unit.sum)):
                if self._union & slot.bit & ~self._dropped:
                    piece.grad = grad if piece.grad is None else piece.grad.add_(grad)
            unit.sum = None
        self._dropped = 0
        self.gathers.invalidate()  # on every rank, also on one that is about to leave out its step by mistake
        self._marks.lead_on()

    def _launched(self) -> int:
        return self._reductions.sent

    def _drain(self, launched: int) -> None:
        self._reductions.drain(launched)
        self._marks.clear()
        self._unwanted.clear()
        self._dropped = 0
