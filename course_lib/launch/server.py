"""The fork server: a process with torch loaded that starts ranks in a few milliseconds.

It is one child of the notebook kernel, test or script, and never runs training code or touches a
GPU. For each run it forks a supervisor (see `supervisor.py`). When its client ends, however it
ends, the server ends every run and itself.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import traceback

from course_lib.launch import frames, processes
from course_lib.launch.supervisor import supervise

# The constructors of DDP and FSDP2 import these: hundreds of modules, seconds of work. Loaded here once, before the
# server says that it is ready, and not in a pause between runs: the next run would have to wait for it.
import torch._dynamo  # isort: skip
import torch.distributed.fsdp  # noqa: F401  isort: skip


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
    client = processes.watch(client_pid)
    if client is not None:
        watch.register(client, selectors.EVENT_READ, "gone")
    scratch: dict[int, str] = {}
    requests.sendall(b"r")
    try:
        while True:
            for key, _ in watch.select():
                if key.data == "gone":
                    return
                if key.data == "child":
                    os.read(wake_r, 4096)
                    _reap(scratch)
                elif not _start(requests, scratch):
                    return
    except Exception:
        traceback.print_exc()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nothing may cut the tidying short
        processes.end_descendants()
        for path in scratch.values():
            shutil.rmtree(path, ignore_errors=True)
        os._exit(0)  # taking hundreds of modules down would only take time


def _start(requests: socket.socket, scratch: dict[int, str]) -> bool:
    """Fork the supervisor of one run. False when the client closed the socket."""
    message, fds, _, _ = socket.recv_fds(requests, 1, 1)
    if not message:
        return False
    path = None
    try:
        path = tempfile.mkdtemp(prefix="course-run-")
        pid = os.fork()
    except OSError as error:  # a full disk or process table ends this run, not the server
        with socket.socket(fileno=fds[0]) as client, contextlib.suppress(OSError):
            frames.send(client, ("not_started", f"{error.strerror or error} (run directory or process)"))
        if path:
            shutil.rmtree(path, ignore_errors=True)
        return True
    if pid == 0:
        code = 1
        try:
            requests.close()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            supervise(socket.socket(fileno=fds[0]), path)
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
        for orphan in set(processes.children()) - set(scratch):  # its supervisor was killed: end what it left
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
