"""Delayed updates: a gradient travels under the whole windows after its own, and is applied when those have run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from course_lib.train.bucketed import Bucketed
from course_lib.train.reducer import CommHook, Reducer
from course_lib.train.saved import refuse_other, refuse_unlike, whose


class Delayed(Bucketed):
    """`Bucketed` that applies the gradient of window t at the end of window t + `delay`.

    `finish_gradient_synchronization()` leaves the window's own buckets on the wire, waits for those of the window
    `delay` before, and makes them `.grad`. In the first `delay` windows nothing has arrived: `.grad` is None, and the
    optimizer's step leaves every parameter and its state alone. What is left at the end comes from `flush()`:

        for _ in model.flush():
            optimizer.step()
            optimizer.zero_grad()

    The gradient applied was computed with parameters `delay` updates old, so the mathematics change; `delay=0` is
    `Bucketed`. The gradient takes `delay` + 1 times its memory. `zero_grad()` belongs after every step, as always.
    With a `comm_hook` a gradient travels no further than the first gradient of the window after. Once, at the end of
    the first window, its gradient is waited for, to rebuild the buckets (`rebuild=False`, or a
    `plan`: never).

    The gradients under way are part of `state_dict()`, by parameter name: a run that is resumed applies them.
    """

    def __init__(self, module: nn.Module, delay: int = 1, bucket_mb: float = 25.0, first_bucket_mb: float | None = 1.0,
                 plan: Sequence[Sequence[str]] | None = None, find_unused: bool = False,
                 comm_hook: CommHook | None = None, hook_state: Any = None, rebuild: bool = True, op: str = "mean",
                 process_group: dist.ProcessGroup | None = None) -> None:
        if delay < 0:
            raise ValueError(f"delay={delay}: give 0 or more windows")
        super().__init__(module, bucket_mb, first_bucket_mb, plan, find_unused=find_unused, comm_hook=comm_hook,
                         hook_state=hook_state, rebuild=rebuild, op=op, process_group=process_group)
        self.delay = delay
        self._under_way: deque[tuple[Reducer, int]] = deque()  # and the parameters that any rank used
        self._idle: list[Reducer] = []

    def flush(self) -> Iterator[int]:
        """Make each gradient that is under way `.grad`, oldest first, for one optimizer step each; yields how many
        are left after it. Training may go on afterwards, with `delay` windows that apply nothing. Raises
        `RuntimeError` inside a window."""
        if self.progress.backwards:
            raise RuntimeError("flush() inside a window: call finish_gradient_synchronization() and step first")
        while self._under_way:
            self._idle.append(self.reducer)
            self._take_oldest()
            yield len(self._under_way)

    def _before_synchronised_backward(self) -> None:
        """A hook may remember what it left out, for the next gradient: it needs the window before to have arrived."""
        if self.reducer.hook is not None and self._under_way:
            try:
                self._under_way[-1][0].wait()
            except Exception:
                self._under_way.pop()  # it never becomes a gradient
                raise
        super()._before_synchronised_backward()

    def _finish(self) -> None:
        if self._observe:
            self._complete()
            self._rebuild()
        self._under_way.append((self.reducer, self._union))
        if len(self._under_way) > self.delay:
            self._take_oldest()
        else:
            self._take_idle()

    def _take_oldest(self) -> None:
        """The oldest set of buckets becomes the present one, and what it holds becomes `.grad`."""
        self._forget()
        layout = self.reducer.assignment
        self.reducer, union = self._under_way.popleft()
        self.reducer.wait()
        self.reducer.deliver([bool(union & slot.bit) for slot in self.slots], dropped_too=True)
        if self.reducer.assignment != layout:
            self.reducer.lay_out(layout)
        self._reduced = self._all if self.op == "sum" else 0

    def _take_idle(self) -> None:
        """A set of buckets that is not under way becomes the present one; `.grad` is None."""
        self._forget()
        idle = self._idle.pop() if self._idle else self.reducer.another()
        if idle.assignment != self.reducer.assignment:
            idle.lay_out(self.reducer.assignment)
        self.reducer = idle

    def _forget(self) -> None:
        for slot in self.slots:
            slot.param.grad = None
        self._reduced = 0

    # the gradients under way, in state_dict()

    def get_extra_state(self) -> dict[str, Any]:
        """Reduced gradients by parameter name, oldest first; waits for them. Call it between windows."""
        gradients = []
        for reducer, union in self._under_way:
            reducer.wait()
            gradients.append({s.name: view.clone() for s, view in zip(self.slots, reducer.views()) if union & s.bit})
        return {**whose(self, any_rank=True), "gradients": gradients}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Raises `ValueError`, with nothing changed, for the state of another strategy or model, and for one with more
        gradients than `delay`."""
        refuse_other(type(self).__name__, state, whose(self), gradients=list)
        for gradients in state["gradients"]:
            refuse_unlike("a gradient under way", gradients, {s.name: s.param for s in self.slots}, whole=False)
        if len(state["gradients"]) > self.delay:
            raise ValueError(f"the checkpoint has {len(state['gradients'])} gradients under way, but "
                             f"delay={self.delay}; resume with delay={len(state['gradients'])} or more, or flush() "
                             "before saving")
        self._forget()
        self._under_way.clear()
        for gradients in state["gradients"]:
            reducer = self.reducer.another()
            for slot, view in zip(self.slots, reducer.views()):
                if slot.name in gradients:
                    view.copy_(gradients[slot.name])
            self._under_way.append((reducer, sum(s.bit for s in self.slots if s.name in gradients)))
