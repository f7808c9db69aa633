"""What all strategies share: windows, `no_sync()`, and the notes the ranks compare before they wait.

A strategy wraps a module and decides when its gradients travel. The training loop is the same for all:

    for batch in window[:-1]:
        with model.no_sync():
            loss_of(model(batch)).backward()
    loss_of(model(window[-1])).backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from operator import or_
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from course_lib.train.broadcast import broadcast_module
from course_lib.train.control import Control, SynchronizationError, ranks_text
from course_lib.train.hooks import Slot, attach
from course_lib.train.saved import refuse_unlike
from course_lib.train.status import Call, Progress, Status, verdict
from course_lib.train.unchanged import AsWrapped, dense_strides


class Strategy(nn.Module):
    """Data parallelism over `process_group` (default: all ranks). Subclasses say when gradients travel.

    With `op="mean"` the gradient of a window becomes the mean over ranks of what each accumulated, with
    `op="sum"` the sum. Rank 0's parameters and buffers are broadcast at the start. As in DDP **the forward
    decides**: a backward is synchronised if the last forward before it ran outside `no_sync()`.

    An exception in a synchronised backward costs that window: its gradients are dropped on all ranks
    and training can go on. What one rank did and another did not is a `SynchronizationError` on all.
    Wrapping a module again takes it over; the older wrapper refuses further use.
    """

    moves_parameters = False
    """Does the strategy itself change the shape of parameters?"""

    find_unused = True
    """May a window leave a parameter without a gradient on every rank? Its `.grad` then stays None."""

    def __init__(self, module: nn.Module, *, op: str = "mean", process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        name = type(self).__name__
        if not dist.is_initialized():
            raise RuntimeError(f"{name} needs a process group: construct it inside the function given to launch.run()")
        if op not in ("mean", "sum"):
            raise ValueError(f"op={op!r}: choose 'mean' or 'sum'")
        for path, part in module.named_modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
                raise ValueError(f"{path or type(part).__name__!r} makes sparse gradients; build it with sparse=False")
        if lazy := [n for n, p in module.named_parameters() if is_lazy(p)]:
            raise ValueError(f"{name}: {lazy[0]!r} has no shape yet; run one forward before wrapping")
        if meta := [n for n, p in module.named_parameters() if p.is_meta]:
            raise ValueError(f"{name}: {meta[0]!r} is on the meta device and has no values; call to_empty() and "
                             "initialise the module before wrapping")
        self.module, self.op = module, op
        self.group = dist.group.WORLD if process_group is None else process_group
        self.control = Control(self.group)
        self.slots = [Slot(i, n, p) for i, (n, p) in enumerate(
            (n, p) for n, p in module.named_parameters() if p.requires_grad)]
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._as_wrapped = AsWrapped(module, whole=not self.moves_parameters)
        if not self.slots:
            raise ValueError(f"{name}: no parameter of {type(module).__name__} requires a gradient, nothing to reduce")
        self.window = self.steps = 0
        self._sync, self.closed, self._failed = True, False, False
        self.ids = frozenset(id(s.param) for s in self.slots)
        self._all = (1 << len(self.slots)) - 1
        self._reduced = 0  # op="sum": parameters whose .grad is still the sum of an earlier synchronisation
        self._stepped: dict[int, int] = {}  # optimizer -> the window it last stepped
        self._union = 0  # parameters that any rank used in this window
        self.progress = Progress()

    def _start(self, *settings: Any) -> None:
        """Last line of a subclass's `__init__`: compare models and settings, broadcast, hook the parameters.
        Raises `SynchronizationError` naming the ranks that were given another model or other `settings`."""
        model = [(n, tuple(t.shape), str(t.dtype), t.requires_grad and dense_strides(t)) for n, t in
                 (*self.module.named_parameters(), *self.module.named_buffers())]
        digest = hashlib.sha256(repr((type(self).__name__, self.op, settings, model)).encode()).digest()
        theirs = self.control.exchange(digest, f"the start of {type(self).__name__}")
        if other := [r for r, d in zip(self.control.ranks, theirs) if d != theirs[0]]:
            raise SynchronizationError(
                f"{ranks_text(other)} wrapped another model, or wrapped it with other settings, than rank "
                f"{self.control.ranks[0]}; give every rank the same parameters (name, shape, dtype, order in memory, "
                "frozen or not) and settings")
        broadcast_module(self.module, self.group)
        self._detach = attach(self)

    def __getstate__(self) -> Any:
        raise TypeError(f"a {type(self).__name__} belongs to its ranks and cannot be copied or pickled; copy "
                        "model.module (an average of weights too), or save model.state_dict()")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As that of any module. Raises `ValueError`, with nothing changed, where one strategy keeps something beside
        the module's state and the other does not, unless `strict=False` asks for what both have; and where both do,
        for the state of another strategy, model or rank."""
        keeps = type(self).get_extra_state is not nn.Module.get_extra_state
        if not isinstance(state_dict, Mapping) or (strict and ("_extra_state" in state_dict) != keeps):
            raise ValueError(f"this is not the state of a {type(self).__name__}: pass what its state_dict() returned; "
                             "to take the parameters alone, load them into the module before it is wrapped")
        if strict and keeps:
            parts = {name.removeprefix("module."): part for name, part in state_dict.items() if name != "_extra_state"}
            refuse_unlike("the parameters", parts, self.module.state_dict(keep_vars=True))
        return super().load_state_dict(state_dict, strict, assign)

    def close(self) -> None:
        """Take the hooks off the parameters. The module can then be wrapped by something else."""
        self._detach()
        self.closed = True

    # the training loop's side

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        recomputing = torch._C._current_graph_task_id() != -1  # a checkpoint's second forward, inside backward
        if torch.is_grad_enabled() and not recomputing:
            self._before_forward()
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro-steps whose *forward* runs inside accumulate locally and send nothing."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def finish_gradient_synchronization(self) -> None:
        """End the window: on return `.grad` of every parameter is the same on all ranks. Call it on every
        rank after the last backward and before the optimizer. Raises `SynchronizationError`, on every rank
        and naming the ranks at fault, if they did not do the same; the window's gradients are then dropped."""
        if self.closed:
            raise RuntimeError(f"this {type(self).__name__} was closed or its module was wrapped again")
        self._agree(Call.FINISH)
        self._finish()
        self.window += 1
        self.progress = Progress()

    # for subclasses

    def _before_synchronised_backward(self) -> None:
        """The first gradient of a synchronised backward is accumulated."""

    def _gradient_ready(self, slot: Slot) -> None:
        """The gradient of a parameter is accumulated; `progress.running` says if this backward is synchronised."""

    def _after_synchronised_backward(self) -> None:
        """Inside `backward()`, when every gradient of it is accumulated."""

    def _finish(self) -> None:
        """All ranks agree that the window is complete: bring `.grad` to its final value."""

    def _drain(self, launched: int) -> None:
        """Launch up to `launched` buckets, so that all ranks issued the same, and wait for all of them."""

    def _launched(self) -> int:
        """Collectives issued since the ranks last compared notes and not waited for."""
        return 0

    def _touched(self) -> bool:
        """Did the training loop change a gradient that was on the wire?"""
        return False

    # bookkeeping

    def _before_forward(self) -> None:
        if self.closed:
            raise RuntimeError(f"this {type(self).__name__} was closed or its module was wrapped again")
        if self.progress.in_backward:  # the last backward never came to its end
            if self.progress.running:
                self._agree(Call.GIVE_UP)
            self.progress.in_backward = False
        if not self.progress.forwards or any(p.requires_grad for p in self._frozen):
            self._as_wrapped.refuse_change(self.module)
        self._failed = False
        self.progress.forwards += 1
        self.progress.armed, self.progress.asked = self._sync, True

    def accumulated(self, slot: Slot) -> None:
        progress = self.progress
        if not progress.in_backward:
            if torch.is_grad_enabled():
                raise RuntimeError("backward(create_graph=True): what is sent could not be differentiated again. Take "
                                   "the inner derivative with torch.autograd.grad(…, create_graph=True), and run one "
                                   "plain backward() of the loss it is part of")
            progress.begin_backward()
            Variable._execution_engine.queue_callback(self._end_backward)
            if progress.running:
                self._before_synchronised_backward()
        if (grad := slot.param.grad) is not None and grad.is_sparse:
            raise RuntimeError(f"the gradient of {slot.name!r} is sparse, and gradients are sent dense; leave out "
                               "sparse=True where the parameter is used")
        progress.seen |= slot.bit
        self._gradient_ready(slot)

    def _end_backward(self) -> None:
        progress = self.progress
        progress.end_backward()
        if progress.running:
            self._after_synchronised_backward()

    def unsum(self, slot: Slot) -> None:
        """op="sum": what is about to be added to is a sum over ranks already. One rank's share of it is
        1/size, so that the next sum gives it back once and not size times."""
        if self._reduced & slot.bit:
            self._reduced &= ~slot.bit
            if slot.param.grad is not None:
                slot.param.grad.mul_(1 / self.control.size)

    def _agree(self, call: Call) -> None:
        """Compare notes with all ranks. Returns if all is well; else every rank drops the window and raises
        (a rank whose own backward raised has had its exception and is only warned)."""
        mine = self.progress.status(call, self.window, self._launched(), self.steps, self._touched())
        notes = self.control.exchange(mine.pack(len(self.slots)), f"the end of window {self.window}")
        if mine.whole and mine.seen == self._all and notes.count(notes[0]) == len(notes):  # as nearly always
            self._union = self._all
            return
        statuses = [Status.unpack(n) for n in notes]
        self._union = reduce(or_, (s.seen for s in statuses))
        problem = verdict(self.control.ranks, statuses, [s.name for s in self.slots], self.find_unused)
        if problem is None:
            return
        self._drain(max(s.launched for s in statuses))
        for slot in self.slots:
            slot.param.grad = None
        self.progress = Progress()
        self.window, self._reduced, self._failed = max(s.window for s in statuses) + 1, 0, True
        if call != Call.GIVE_UP:
            raise SynchronizationError(problem)
        warnings.warn(problem, stacklevel=4)

    def before_step(self, optimizer: Optimizer) -> None:
        """Refuse a step on gradients that are not final; the other ranks learn of it in their finish."""
        if self._failed:
            raise SynchronizationError(f"window {self.window - 1} failed and its gradients were dropped: leave out "
                                       "this optimizer step and start the next window")
        progress = self.progress
        again = progress.forwards and self._stepped.get(id(optimizer), 0) == self.window
        if progress.backwards or progress.in_backward or again:
            self._agree(Call.STEP)
        self._stepped[id(optimizer)] = self.window
        self.steps += 1
