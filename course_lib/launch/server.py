"""The fork server: a process with torch loaded that starts ranks in a few milliseconds.

It is one child of the notebook kernel, test or script, and never runs training code or touches a
GPU. For each run it forks a supervisor (see `supervisor.py`). When its client ends, however it
ends, the server ends every run and itself.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import traceback

from course_lib.launch import processes
from course_lib.launch.supervisor import supervise


def main(fd: int, client_pid: int) -> None:
    """Serve until the client has gone. `fd` is a Unix socket on which each run's own socket arrives."""
    requests = socket.socket(fileno=fd)
    processes.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    watch = selectors.DefaultSelector()
    watch.register(requests, selectors.EVENT_READ, "request")
    watch.register(wake_r, selectors.EVENT_READ, "child")
    client = _watch_process(client_pid)
    if client is not None:
        watch.register(client, selectors.EVENT_READ, "gone")
    scratch: dict[int, str] = {}
    requests.sendall(b"r")
    loaded = False
    try:
        while True:
            wait = None if loaded or scratch else _IDLE_S
            events = watch.select(wait)
            if wait and not events:
                loaded = _load_more()
            for key, _ in events:
                if key.data == "gone":
                    return
                if key.data == "child":
                    os.read(wake_r, 4096)
                    _reap(scratch)
                elif not _start(requests, scratch, client_pid):
                    return
    except Exception:
        traceback.print_exc()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nothing may cut the tidying short
        processes.end_descendants()
        for path in scratch.values():
            shutil.rmtree(path, ignore_errors=True)
        os._exit(0)  # taking hundreds of modules down would only take time


_IDLE_S = 0.3


def _load_more() -> bool:
    """Import, while no run is going and nobody asks for one, what the constructors of DDP and FSDP2 would import on
    every rank of every run (hundreds of modules, seconds of work)."""
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401
    return True


def _watch_process(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends, where the system has one."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _start(requests: socket.socket, scratch: dict[int, str], client_pid: int) -> bool:
    """Fork the supervisor of one run. False when the client closed the socket."""
    message, fds, _, _ = socket.recv_fds(requests, 1, 1)
    if not message:
        return False
    path = tempfile.mkdtemp(prefix="course-run-")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            requests.close()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            supervise(socket.socket(fileno=fds[0]), path, client_pid)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(fds[0])
    scratch[pid] = path
    return True


def _reap(scratch: dict[int, str]) -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if path := scratch.get(pid):
            shutil.rmtree(path, ignore_errors=True)  # before it is forgotten: a SIGTERM may come in between
            del scratch[pid]
            for orphan in set(processes.children()) - set(scratch):  # its supervisor was killed: end its ranks
                os.kill(orphan, signal.SIGKILL)
