"""The bucketed reducer: gradients go into buckets as they become ready, full buckets go onto the wire.

Three rules make it right on every rank. Buckets are launched strictly in index order, whatever order
they fill in, because collectives pair up by the order of their launch. Nothing waits inside backward.
A gradient that comes after its bucket has left is an error, never a correction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_lib import record
from course_lib.record import now
from course_lib.train.bucket import Bucket, factor, take_in

CommHook = Callable[[Any, Bucket], torch.futures.Future]


class LateGradient(RuntimeError):
    """A gradient arrived for a bucket that is already on the wire."""


class Reducer:
    """Buckets of one model on one rank.

    `scale` multiplies every gradient on its way into its bucket (1/size for a mean: dividing before the
    sum keeps half precision in range); None leaves it. With `as_view`, `.grad` becomes the view into the
    bucket, so that later backward passes accumulate straight into it. A `hook(state, bucket)` replaces the
    all-reduce and returns a future of the final flat gradient.
    """

    def __init__(self, params: Sequence[nn.Parameter], group: dist.ProcessGroup, scale: float | None,
                 as_view: bool = True, hook: CommHook | None = None, hook_state: Any = None) -> None:
        self.params, self.group, self.as_view = list(params), group, as_view
        self.scale = factor(scale)
        self.hook, self.hook_state = hook, hook_state
        self.assignment: list[list[int]] = []
        self.buckets: list[Bucket] = []
        self.flying: list[tuple[Bucket, Any]] = []
        self.ready_ns = [0] * len(self.params)
        self._place: list[tuple[Bucket, int]] = []
        self._arrived = [False] * len(self.params)
        self._versions: list[int | None] = [None] * len(self.params)
        self.launched = 0
        """Buckets on the wire, a prefix of `buckets`."""

    def another(self) -> Reducer:
        """Like this one, with buckets of its own. Make it while no parameter has a gradient: laying out moves it."""
        other = Reducer(self.params, self.group, None, self.as_view, self.hook, self.hook_state)
        other.scale = self.scale
        other.lay_out(self.assignment)
        return other

    def lay_out(self, assignment: Sequence[Sequence[int]]) -> None:
        """(Re)make the buckets. Gradients that exist move into their new place and keep their values."""
        self.assignment = [list(b) for b in assignment]
        last = max((i for i, members in enumerate(self.assignment) if any(self.params[j].numel() for j in members)),
                   default=-1)  # a bucket without elements is never launched
        self.buckets = [Bucket(i, [self.params[j] for j in members], i == last)
                        for i, members in enumerate(self.assignment)]
        place = {j: (bucket, k) for bucket, members in zip(self.buckets, self.assignment)
                 for k, j in enumerate(members)}
        self._place = [place[j] for j in range(len(self.params))]
        if self.as_view:
            for param, view in zip(self.params, self.views()):
                if param.grad is not None:
                    view.copy_(param.grad)
                    param.grad = view

    def start(self) -> None:
        """Before the first gradient of a synchronised backward."""
        for bucket in self.buckets:
            bucket.waiting = len(bucket.views)
            bucket.hold()
        self._arrived = [False] * len(self.params)
        self.launched = 0

    def ready(self, index: int) -> None:
        """Gradient `index` is final for this backward: put it into its bucket, launch what is full."""
        if self._arrived[index]:
            raise LateGradient
        self._arrived[index] = True
        bucket, k = self._place[index]
        param, view = self.params[index], bucket.views[k]
        take_in(param, view, self.scale, self.as_view)
        self._versions[index] = None if param.grad is None else param.grad._version
        self.ready_ns[index] = at = now()
        if bucket.waiting == len(bucket.views):
            bucket.first_ready = at
        bucket.waiting -= 1
        if not bucket.waiting:
            bucket.full = at
            self._launch_full()

    def written_to(self) -> bool:
        """Has a gradient been written to since it was put into a bucket that is on the wire? With a hook nobody knows,
        because a hook may write to the views itself."""
        return bool(self.flying) and self.hook is None and any(
            version is not None and param.grad is not None and param.grad._version != version
            for param, version in zip(self.params, self._versions))

    def missing(self) -> list[int]:
        """Parameters whose gradient has not come in this backward."""
        return [i for i, here in enumerate(self._arrived) if not here]

    def launch_up_to(self, count: int) -> None:
        """Launch buckets, full or not, until `count` are on the wire: the other ranks launched as many."""
        while self.launched < min(count, len(self.buckets)):
            self._launch(self.buckets[self.launched])

    def arrivals(self) -> Iterator[Bucket]:
        """Each bucket that is on the wire as soon as it holds its final gradient, in the order of launch. After a
        failure no more are handed out; it is raised when nothing is on the wire any more, so that the next window
        can begin."""
        failed = None
        for bucket, handle in self.flying:
            try:
                result = handle.wait()
                if self.hook is not None:
                    bucket.set_buffer(result[0] if isinstance(result, list | tuple) else result)
            except Exception as error:
                failed = failed or error
            if failed is None:
                yield bucket
        self.flying.clear()
        self.launched = 0
        if failed is not None:
            raise failed

    def wait(self) -> None:
        """Until every launched bucket holds its final gradient; raises what failed."""
        for _ in self.arrivals():
            pass

    def views(self) -> list[torch.Tensor]:
        """Where the gradient of each parameter lies in the buckets."""
        return [bucket.views[k] for bucket, k in self._place]

    def deliver(self, used: Sequence[bool], dropped_too: bool = False) -> None:
        """Make `.grad` of every parameter what its bucket holds. `used[i]` is False for a parameter that no
        rank used in this window: it keeps what it has, which may be None. A gradient that the training loop has dropped
        since its bucket left stays away, unless `dropped_too`."""
        for i, (param, view) in enumerate(zip(self.params, self.views())):
            dropped = self._versions[i] is not None and not dropped_too
            if param.grad is view or (param.grad is None and (dropped or not used[i])):
                continue
            if self.as_view:
                param.grad = view
            elif param.grad is None:
                param.grad = view.clone()
            else:
                param.grad.copy_(view)

    def _launch_full(self) -> None:
        while self.launched < len(self.buckets) and not self.buckets[self.launched].waiting:
            bucket = self.buckets[self.launched]
            if (recorder := record.active()) is not None:
                recorder.add("fill", "bucket", f"bucket {bucket.order}", bucket.first_ready, bucket.full, bucket.bytes,
                             bucket.order)
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        self.launched += 1
        if not bucket.bytes:
            return
        with record.tag(bucket.order):
            if self.hook is None:
                handle = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
            else:
                handle = self.hook(self.hook_state, bucket)
        self.flying.append((bucket, handle))
