"""The life of one rank: join the wires, join the group, run the learner's function, hand the result back."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import random
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import cloudpickle
import numpy
import torch
import torch.distributed as dist

from course_lib.launch import frames, netns
from course_lib.launch.board import Board
from course_lib.launch.fabric import Fabric
from course_lib.launch.gloo import WireSpec
from course_lib.launch.link import Pace
from course_lib.launch.processes import LINUX
from course_lib.launch.request import RETURN_PLAIN, Request
from course_lib.launch.ship import unpack
from course_lib.launch.wire import register

STACK_SIGNAL = signal.SIGUSR1


@dataclass
class Context:
    """Where this rank is. `launch.context()` returns it inside a run."""

    rank: int
    ranks: int
    fabric: Fabric
    spec: WireSpec


context: Context | None = None


def wire_spec(fabric: Fabric, timeout_s: float) -> WireSpec:
    """The rank-side view of a resolved fabric."""
    paced = fabric.kind == "paced"
    latency = (lambda s: s) if fabric.kind in ("shaped", "paced") else (lambda s: 0.0)

    def pace(latency_s: float, gbit: float | None) -> Pace:
        return Pace(latency(latency_s), 8e-9 / gbit if paced and gbit else None)

    node_of = tuple(node for node in range(fabric.nodes) for _ in range(fabric.ranks_per_node))
    return WireSpec(kind=fabric.kind, provenance=fabric.provenance_note(),
                    interface=netns.INTERFACE if fabric.kind == "shaped" else None, node_of=node_of,
                    inner=pace(fabric.latency_s(), fabric.rate_gbit()),
                    inter=pace(fabric.inter_latency_s(), fabric.inter_rate_gbit()), timeout_s=timeout_s)


def wires_of(fabric: Fabric) -> netns.Wires:
    node_of = tuple(node for node in range(fabric.nodes) for _ in range(fabric.ranks_per_node))
    return netns.Wires(node_of, fabric.rate_gbit(), fabric.inter_rate_gbit())


def join(request: Request, rank: int, store_path: str, board: Board) -> None:
    """Initialise torch.distributed on this rank."""
    global context
    spec = wire_spec(request.fabric, request.timeout_s + 5)  # so that the supervisor speaks first
    context = Context(rank, request.ranks, request.fabric, spec)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % request.fabric.ranks_per_node),
                      WORLD_SIZE=str(request.ranks), GLOO_SOCKET_IFNAME=spec.interface or ("lo" if LINUX else "lo0"),
                      COURSE_RUN=str(os.getppid()))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // request.ranks))
    random.seed(rank)
    numpy.random.seed(rank)
    if request.fabric.kind == "nccl":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    else:
        register(spec, board)
        backend = "wire"
    store = dist.FileStore(store_path, request.ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=request.ranks,
                            timeout=timedelta(seconds=request.timeout_s + 5))


def live(request: Request, rank: int, link: socket.socket, stack_file, store_path: str, board: Board) -> None:
    """Run to the end and never return. Whatever happens is one message to the supervisor."""
    faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # a pipe would hold lines back until the rank ends, or lose them
    me = os.getpid()
    try:
        os.environ.clear()
        os.environ.update(request.environ)
        os.chdir(request.cwd)
        sys.path[:] = request.path
        join(request, rank, store_path, board)
        fn, args = unpack(request.payload)
        message = ("result", _packed(fn(*args), fn))
    except BaseException as error:
        if os.getpid() != me and not isinstance(error, SystemExit):
            traceback.print_exc()
        message = ("error", *_describe(error))
    _flush()
    if os.getpid() != me:  # a process that the function forked, and that came back from it too, is not the rank
        os._exit(message[0] == "error")
    try:
        frames.send(link, message)
        frames.receive(link)  # stay: a rank that leaves early makes the others fail with the wrong story
    except (EOFError, OSError):
        pass
    os._exit(0)


def _packed(result: Any, fn: Callable) -> bytes:
    """The result as bytes. Raises `TypeError` saying what cannot travel and what to do."""
    try:
        return cloudpickle.dumps(result)
    except Exception as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise TypeError(f"what {name} returned, a {type(result).__name__}, cannot travel from the rank to you "
                        f"({error}). {RETURN_PLAIN}") from error


def _describe(error: BaseException) -> tuple[str, bytes | None]:
    """The traceback from the learner's function on, and the exception itself where it can travel."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    text = "".join(traceback.format_exception(type(error), error, tb or error.__traceback__))
    try:
        body = cloudpickle.dumps(error)
        pickle.loads(body)
    except Exception:
        body = None
    return text, body


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the function may have put anything in its place, None as well
            stream.flush()
