"""Where collectives are issued: one after the other on each rank, by a thread of their own, in the order of the calls.

A collective here is many messages, so somebody has to sit between them. One queue a process does it for all groups.
Ranks that issue their collectives in one order therefore never wait for each other in a circle, and whoever waits
for one in a future's callback never holds up the thread that has to move it.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist

from course_lib import record
from course_lib.launch.link import Link, Pace, Transfer, WireWork
from course_lib.launch.wire import Wire

OPS = ("sum", "mean")
lanes: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
"""Of groups with an order of their own that are no Wires; a Wire says so itself, in `queue`."""


@functools.cache
def _queue() -> Link:
    """Made at the first call, so that at exit it is closed before the wires that its messages go through."""
    link = Link("collectives", Pace())
    atexit.register(link.close)
    return link


def issue(name: str, tensor: torch.Tensor, group: dist.ProcessGroup, body: Callable[[], None],
          async_op: bool) -> dist.Work | None:
    """Run `body` after every collective issued before. Returns its work, whose future gives `tensor`; without
    `async_op`, waits and returns None."""
    limit_s = group.spec.timeout_s if isinstance(group, Wire) else 60.0
    nbytes, bucket, issued = tensor.numel() * tensor.element_size(), record.tagged(), record.now()

    def run() -> None:
        with record.tag(bucket):
            body()

    # Twice the limit of a message, so that the message that is late is heard first: it names the other rank.
    work = WireWork(f"rank {dist.get_rank()}: {name} of {nbytes} bytes", 2 * limit_s)
    label = f"{name} bytes={nbytes}"
    lane = lanes.get(group) or getattr(group, "queue", "collective")  # as on the wire: an order of its own
    _queue().put(lane, Transfer(work, lambda: SimpleNamespace(wait=run), tensor, 0, issued, label))
    if async_op:
        return work
    work.wait()
    return None


def checked(tensor: torch.Tensor, op: str, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, dist.ProcessGroup]:
    """The tensor as a flat view, and the group. Raises `ValueError` on what cannot be reduced in place."""
    group = dist.group.WORLD if group is None else group
    if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group it was given; call this on its members only")
    if op not in OPS:
        raise ValueError(f"op={op!r}: choose one of {', '.join(OPS)}")
    if tensor.device.type != "cpu":
        raise ValueError(f"the tensor is on {tensor.device}, and these collectives move CPU tensors; use "
                         "dist.all_reduce there, or move the tensor to the CPU")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("the tensor is conjugated or negated when it is read, and what lies in memory is sent; pass "
                         "tensor.resolve_conj().resolve_neg() and copy the result back")
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous, so it cannot be reduced in place; pass tensor.contiguous() and "
                         "copy the result back")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"the mean of {tensor.dtype} would be rounded; use op='sum', or a floating-point tensor")
    return tensor.detach().view(-1), group
