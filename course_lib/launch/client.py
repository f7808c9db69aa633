"""`run`: start ranks from a notebook cell, a script, a test or the grader, always the same way."""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from course_lib.launch import frames, request
from course_lib.launch.ceiling import refuse_above_ceiling
from course_lib.launch.fabric import Fabric, as_fabric
from course_lib.launch.request import RankDied, RankFailed, Request, RunError, RunNotStarted, RunTimeout
from course_lib.launch.ship import pack

LONGEST_S = 1e6
"""A time limit in seconds that every clock on the way can hold."""


def run(fn: Callable, *args: Any, ranks: int = 2, fabric: str | Fabric = "auto", timeout_s: float = 120.0) -> list:
    """Call `fn(*args)` on `ranks` processes joined by `fabric`; return their results, rank 0 first.

    Inside `fn`, torch.distributed is initialised and `launch.context()` describes the rank. `fn` and
    `args` are shipped by value, so `fn` may be defined in a notebook cell. What ranks print appears
    here, marked with the rank. Under `torchrun` the group that is there is used and `fn` runs in this
    process.

    Raises `ValueError` for what can be refused before anything starts, `RankFailed` with the rank's
    traceback, `RankDied`, or `RunTimeout`, which names the rank the others wait for. On return, on an
    error and on an interrupt alike, no process of the run is left.
    """
    _refuse(fn, ranks, timeout_s)
    ranks, timeout_s = int(ranks), float(timeout_s)  # numpy's may come
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from course_lib.launch.elastic import run_here
        return run_here(fn, args, ranks)
    wires = as_fabric(fabric).resolved(ranks)
    refuse_above_ceiling(wires, ranks)
    asked = Request(payload=pack(fn, args), ranks=ranks, fabric=wires, timeout_s=timeout_s, cwd=_here(),
                    path=tuple(sys.path), environ=dict(os.environ))
    ours, theirs = socket.socketpair()
    try:
        with theirs:  # the supervisor's copy alone keeps it open
            _server().start_run(theirs)
        frames.send(ours, asked)
        return _collect(ours)
    finally:
        _leave(ours)


def _refuse(fn: Any, ranks: Any, timeout_s: float) -> None:
    if not callable(fn):
        raise ValueError(f"run() needs a function to call on every rank, not {type(fn).__name__}")
    if not isinstance(ranks, Integral) or isinstance(ranks, bool) or not 1 <= ranks <= 256:
        raise ValueError(f"ranks={ranks!r}: give a whole number from 1 to 256")
    if not isinstance(timeout_s, Real) or isinstance(timeout_s, bool) or not 0 < timeout_s <= LONGEST_S:
        raise ValueError(f"timeout_s={timeout_s!r}: give a number of seconds above 0, and {LONGEST_S:.0f} at most")
    if "COURSE_RUN" in os.environ:
        raise ValueError("run() was called on a rank: start ranks from the notebook or script, not from inside a run")


def _here() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ValueError("the folder you are in has been removed, and ranks start in it: go to another one") from None


def _collect(sock: socket.socket) -> list:
    """Print what the ranks print until the supervisor gives its verdict."""
    lines = _Lines()
    try:
        while True:
            try:
                kind, *rest = frames.receive(sock)
            except (EOFError, ConnectionError):
                raise RunError("the supervisor of the run ended without a word; see the terminal") from None
            if kind == "output":
                lines.add(*rest)
                continue
            lines.finish()
            return _conclude(kind, rest)
    finally:
        lines.finish()


def _conclude(kind: str, rest: list) -> list:
    if kind == "results":
        return [_unpacked(rank, body) for rank, body in enumerate(rest[0])]
    if kind == "error":
        rank, text, body = rest
        try:
            cause = pickle.loads(body) if body else None
        except Exception:  # it could be read on the rank, and cannot be here
            cause = None
        raise RankFailed(rank, text, cause) from cause
    if kind == "died":
        raise RankDied(*rest)
    if kind == "timeout":
        raise RunTimeout(rest[0])
    raise RunNotStarted(f"the run could not start: {rest[0]}")


def _unpacked(rank: int, body: bytes) -> Any:
    try:
        return pickle.loads(body)
    except Exception as error:
        raise RunError(f"what rank {rank} returned cannot be made again here ({type(error).__name__}: {error}). "
                       f"{request.RETURN_PLAIN}") from error


class _Lines:
    """Whole lines, each marked with its rank, from parts that end anywhere."""

    def __init__(self) -> None:
        self._open: dict[int, list[bytes]] = {}

    def add(self, rank: int, part: bytes) -> None:
        first, *rest = part.split(b"\n")
        begun = self._open.setdefault(rank, [])
        begun.append(first)
        if rest:
            self._print(rank, b"".join(begun))
            for line in rest[:-1]:
                self._print(rank, line)
            self._open[rank] = [rest[-1]]

    def finish(self) -> None:
        for rank, parts in sorted(self._open.items()):
            if line := b"".join(parts):
                self._print(rank, line)
        self._open.clear()

    @staticmethod
    def _print(rank: int, line: bytes) -> None:
        text = line.decode(errors="replace").rsplit("\r", 1)[-1]
        try:
            print(f"[rank {rank}] {text}", flush=True)
        except UnicodeEncodeError as error:  # what cannot be shown here must not end the run
            print(f"[rank {rank}] {text.encode(error.encoding, 'backslashreplace').decode(error.encoding)}", flush=True)


def _leave(sock: socket.socket) -> None:
    """Tell the supervisor to stop and wait until it has ended every process of the run."""
    try:
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(15)
        while sock.recv(1 << 16):
            pass
    except OSError:
        pass
    finally:
        sock.close()


class _Server:
    """Our side of the fork server."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._sock, theirs = socket.socketpair()
        code = (f"import sys; sys.path[:] = {sys.path!r}; from course_lib.launch.server import main; "
                f"main({theirs.fileno()}, {self.owner})")
        self._process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()],
                                         stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()
        self._sock.settimeout(120)
        try:
            if self._sock.recv(1) != b"r":
                raise RunNotStarted("the fork server did not start; see the terminal for its error")
        except TimeoutError:
            self.stop()
            raise RunNotStarted("the fork server did not start within 120 s (loading torch takes seconds)") from None

    def alive(self) -> bool:
        return self.owner == os.getpid() and self._process.poll() is None

    def start_run(self, sock: socket.socket) -> None:
        socket.send_fds(self._sock, [b"n"], [sock.fileno()])

    def stop(self) -> None:
        if self.owner == os.getpid():
            self._sock.close()
            self._process.terminate()  # it may be loading modules, which nobody needs any more
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()


_current: _Server | None = None
_lock = threading.Lock()


def _server() -> _Server:
    global _current
    with _lock:
        if _current is None or not _current.alive():
            _current = _Server()
        return _current


def warm_up() -> None:
    """Start the fork server now, so that the first `run` does not wait for torch to load."""
    _server()


@atexit.register
def _stop() -> None:
    if _current is not None:
        _current.stop()
