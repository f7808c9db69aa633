"""`run` under torchrun: the ranks are there already, and each calls the function itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous


def run_here(fn: Callable, args: tuple, ranks: int) -> list:
    """Call `fn(*args)` on this rank of torchrun's group and gather every rank's result."""
    world = int(os.environ["WORLD_SIZE"])
    if ranks != world:
        raise ValueError(f"run(ranks={ranks}) under torchrun with {world} ranks: give ranks={world}, or start "
                         f"torchrun with --nproc-per-node={ranks}")
    if not dist.is_initialized():
        join()
    results = [None] * world
    dist.all_gather_object(results, fn(*args))
    return results


def join(timeout_s: float = 600.0) -> None:
    """Initialise the default group from torchrun's environment: NCCL with enough GPUs, else gloo
    through our Wire on whatever network there is."""
    from course_lib.launch import rank as here
    from course_lib.launch.fabric import Fabric
    from course_lib.launch.meeting import meet
    from course_lib.launch.wire import register
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    nccl = torch.cuda.is_available() and torch.cuda.device_count() >= local
    fabric = Fabric(kind="nccl" if nccl else "loopback", nodes=max(1, world // local), ranks_per_node=local)
    spec = replace(here.wire_spec(fabric, timeout_s), machines=fabric.nodes)
    here.context = here.Context(rank, world, fabric, spec)
    if nccl:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        register(spec)
    limit = timedelta(seconds=timeout_s)
    store, _, _ = next(rendezvous("env://", timeout=limit))
    while isinstance(store, dist.PrefixStore):  # torch's own parts are told apart by numbers that nodes disagree about
        store = store.underlying_store
    dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "wire", store=meet(store, rank, world, timeout_s),
                            rank=rank, world_size=world, timeout=limit)
