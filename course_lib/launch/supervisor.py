"""One run: build the wires, fork the ranks, pass on what they say, and leave nothing behind."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import shutil
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from course_lib.launch import frames, netns, processes
from course_lib.launch.board import Board
from course_lib.launch.rank import STACK_SIGNAL, live, wires_of
from course_lib.launch.request import Request

_OWN_CODE = os.path.join("launch", "rank.py")  # below this frame a stack is ours, not the learner's
_PEER_LEFT = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
_GRACE_S = 0.3  # after a first failure, how long other ranks may still report


@dataclass
class _Rank:
    number: int
    pid: int
    link: socket.socket
    output: int
    stack: IO[bytes]
    ended: int | None
    """Readable once the process has ended, where the system has such a descriptor."""
    answer: tuple | None = None


def supervise(client: socket.socket, scratch: str) -> None:
    """Serve one request on `client`, then end every descendant, whatever happened."""
    processes.adopt_orphans()
    ranks: list[_Rank] = []
    try:
        request: Request = frames.receive(client)
        board = Board(request.ranks)
        try:
            _start(request, client, scratch, board, ranks)
        except OSError as error:
            hint = ". Each rank needs five descriptors: raise `ulimit -n`" if error.errno == errno.EMFILE else ""
            frames.send(client, ("not_started", f"{error}{hint}"))
            return
        final = _watch(request, client, ranks, board)
    except EOFError:
        return
    except BaseException:
        final = ("not_started", traceback.format_exc())
    finally:
        processes.end_descendants({r.pid for r in ranks})
        shutil.rmtree(scratch, ignore_errors=True)  # the server does so too, if it is still there
    with contextlib.suppress(OSError):
        _drain(client, ranks)
        frames.send(client, final)


def _start(request: Request, client: socket.socket, scratch: str, board: Board, ranks: list[_Rank]) -> None:
    """Fork the ranks into `ranks`, so that those already there are known when a later one fails."""
    shaped = request.fabric.kind == "shaped"
    wires = wires_of(request.fabric) if shaped else None
    if shaped:
        netns.make_switch(wires)
    store, me = os.path.join(scratch, "store"), os.getpid()
    for rank in range(request.ranks):
        ranks.append(_fork(request, rank, wires, store, board, me, scratch, lambda: _let_go(client, ranks)))
    if shaped:
        for r in ranks:
            r.link.settimeout(20)
            if r.link.recv(1) != b"r":
                raise OSError(f"rank {r.number} could not leave for its own network namespace")
        netns.plug_in(wires, [r.pid for r in ranks])
        for r in ranks:
            r.link.sendall(b"g")
            r.link.settimeout(None)


def _let_go(client: socket.socket, ranks: list[_Rank]) -> None:
    """In a rank: close what is the supervisor's. Nobody else may speak to the client or for another rank."""
    client.close()
    for r in ranks:
        r.link.close()
        r.stack.close()
        for fd in (r.output, r.ended):
            if fd is not None:
                os.close(fd)


def _fork(request: Request, rank: int, wires, store: str, board: Board, parent: int, scratch: str,
          let_go: Callable[[], None]) -> _Rank:  # fmt: skip
    ours, theirs = socket.socketpair()
    out_r, out_w = os.pipe()
    stack = open(os.path.join(scratch, f"stack-{rank}"), "w+b")  # noqa: SIM115  both processes keep it
    pid = os.fork()
    if pid == 0:
        try:
            processes.die_with_parent(parent)
            ours.close()
            let_go()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.dup2(out_w, 1)
            os.dup2(out_w, 2)
            devnull = os.open(os.devnull, os.O_RDONLY)
            os.dup2(devnull, 0)
            for fd in (out_r, out_w, devnull):
                os.close(fd)
            if wires:
                netns.step_out()
                theirs.sendall(b"r")
                if theirs.recv(1) != b"g":
                    os._exit(1)
                netns.bring_up(wires, rank)
            live(request, rank, theirs, stack, store, board)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    theirs.close()
    os.close(out_w)
    return _Rank(rank, pid, ours, out_r, stack, processes.watch(pid))


def _watch(request: Request, client: socket.socket, ranks: list[_Rank], board: Board) -> tuple:
    """Pass output on until every rank has answered, one has failed, or time is up."""
    select = selectors.DefaultSelector()
    select.register(client, selectors.EVENT_READ, None)
    for r in ranks:
        select.register(r.link, selectors.EVENT_READ, (r, "link"))
        select.register(r.output, selectors.EVENT_READ, (r, "output"))
        if r.ended is not None:
            select.register(r.ended, selectors.EVENT_READ, (r, "ended"))
    deadline = time.monotonic() + request.timeout_s
    failed_at = None
    while True:
        limit = deadline if failed_at is None else failed_at + _GRACE_S
        left = limit - time.monotonic()
        if left <= 0:
            return _verdict(ranks) if failed_at is not None else _stuck(request, ranks, board)
        for key, _ in select.select(left):
            if key.data is None:
                raise EOFError("the client has gone or interrupts")
            r, what = key.data
            if what == "output":
                part = os.read(r.output, 65536)
                if part:
                    frames.send(client, ("output", r.number, part))
                else:
                    select.unregister(r.output)
                continue
            if what == "ended":  # its end of the link may live on in a process that it started
                select.unregister(r.ended)
            if r.answer is None:
                select.unregister(r.link)
                r.answer = _answer(r, limit_s=0.0 if what == "ended" else 30.0)
                if r.answer[0] != "result" and failed_at is None:
                    failed_at = time.monotonic()
        if all(r.answer for r in ranks):
            return _verdict(ranks)


def _answer(r: _Rank, limit_s: float) -> tuple:
    """What the rank said. A rank that closed its link, wrote something else into it, or stopped in the middle of a
    message is ended."""
    try:
        r.link.settimeout(limit_s)
        kind, *said = frames.receive(r.link)
        return (kind, *said)
    except Exception:
        return ("died", processes.reap(r.pid, limit_s=2.0))


def _verdict(ranks: list[_Rank]) -> tuple:
    """Results if all delivered; else the first real failure. A rank whose peer left is not to blame."""
    failures = [(r.number, r.answer) for r in ranks if r.answer and r.answer[0] != "result"]
    if not failures:
        return ("results", [r.answer[1] for r in ranks])
    failures.sort(key=lambda f: (f[1][0] == "error" and any(sign in str(f[1][1]) for sign in _PEER_LEFT), f[0]))
    number, answer = failures[0]
    return (answer[0], number, *answer[1:])


def _stuck(request: Request, ranks: list[_Rank], board: Board) -> tuple:
    """Say who waits for whom, and where each silent rank's own code stands."""
    silent = [r for r in ranks if r.answer is None]
    for r in silent:
        with contextlib.suppress(ProcessLookupError):
            os.kill(r.pid, STACK_SIGNAL)
    time.sleep(0.2)
    lines = [f"no result within {request.timeout_s:g} s.", board.explain()]
    for r in silent:
        r.stack.seek(0)
        stack = r.stack.read().decode(errors="replace").partition(_OWN_CODE)[0].rpartition("\n")[0]
        if stack:
            lines.append(f"rank {r.number} stands at:\n{stack}")
        elif processes.is_stopped(r.pid):
            lines.append(f"rank {r.number} was stopped by a signal (SIGSTOP or the like) and not continued")
        else:
            lines.append(f"rank {r.number} does not say where it stands: its code has taken signal "
                         f"{STACK_SIGNAL.name}, or ended in the meantime")
    return ("timeout", "\n".join(lines))


def _drain(client: socket.socket, ranks: list[_Rank]) -> None:
    """Output that was still in the pipes when the ranks ended."""
    for r in ranks:
        os.set_blocking(r.output, False)
        with contextlib.suppress(BlockingIOError):
            while part := os.read(r.output, 65536):
                frames.send(client, ("output", r.number, part))
