"""Where ranks start and which wires join them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.launch.client import run, warm_up
from course_lib.launch.fabric import PRESETS, Fabric
from course_lib.launch.request import RankDied, RankFailed, RunError, RunNotStarted, RunTimeout

if TYPE_CHECKING:
    import torch.distributed as dist

    from course_lib.launch.rank import Context
    from course_lib.launch.wire import Wire

__all__ = ["PRESETS", "Fabric", "RankDied", "RankFailed", "RunError", "RunNotStarted", "RunTimeout", "context",
           "control_group", "current_wire", "run", "warm_up"]


def context() -> Context:
    """Rank, number of ranks and fabric of the run this code is in. Raises `RuntimeError` outside one."""
    from course_lib.launch import rank
    if rank.context is None:
        raise RuntimeError("context() is for code on a rank: call it inside the function given to run()")
    return rank.context


def current_wire() -> Wire:
    """The default group's Wire, with its `traffic`. Raises `RuntimeError` where there is none (NCCL, plain gloo)."""
    import torch.distributed as dist

    from course_lib.launch.wire import Wire
    group = dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(group, Wire):
        raise RuntimeError("the default group does not run on a Wire here")
    return group


_control: dict[int, dist.ProcessGroup] = {}


def control_group() -> dist.ProcessGroup:
    """A plain gloo group of all ranks for a few bytes of bookkeeping. It pays no latency, keeps no
    order with the Wire and is not counted; every rank must call this at the same point once."""
    import torch.distributed as dist
    key = id(dist.group.WORLD)
    if key not in _control:
        _control.clear()
        _control[key] = dist.new_group(backend="gloo")
    return _control[key]
