"""Run as a script: build the sandbox around this process, then become the program that is to be kept in it.

The namespaces belong to a user namespace made here. The root of the file system is a fresh tmpfs that holds
only what the plan names, read-only but for /tmp and the work directory, which are of limited size and vanish with
it; only the files that the plan calls writable are kept. The program runs as an ordinary user
in a second user namespace: without any capability, yet able to make namespaces of its own, as a shaped fabric
does. Process 1 waits for it and, by ending, takes every process of the sandbox along.

It uses nothing but the standard library and `course_lib.launch.processes`, whose file it is given.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import resource
import signal
import socket
import struct
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
ATTR_RDONLY, ATTR_NOSUID = 1, 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR = 442
DEVICES = ("null", "zero", "full", "random", "urandom")
INNER_UID = 1000
SETUP_FAILED = 96
"""Exit code when the sandbox could not be built; the reason is on standard error."""

_libc = ctypes.CDLL(None, use_errno=True)


def main(plan: dict) -> int:
    """Build what `plan` says and run its `argv`. Returns the exit code of the program, 128 + n for signal n."""
    processes = _load(plan["processes"])
    processes.die_with_parent(plan["parent"])
    if plan["namespaces"]:
        uid, gid = os.geteuid(), os.getegid()
        me = os.getpid()
        processes.unshare(
            CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
        )
        _map_user(0, uid, gid)
        first = os.fork()
        if first == 0:
            _become_first(processes, plan, me)
        # Who ends this process waits for it, and it waits for process 1, which is over when all of the sandbox is.
        signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGKILL))
        return _waited(first)
    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    child = os.fork()
    if child == 0:
        processes.die_with_parent(os.getppid())
        os.chdir(plan["cwd"])
        _enter(plan)
    try:
        return _reap_until(child)
    finally:
        processes.end_descendants({child})


def _become_first(processes, plan: dict, parent: int) -> None:
    """Process 1 of the sandbox: mount, start the program, wait for it, end."""
    try:
        # getppid() is 0 across the edge of a pid namespace, so the usual check would always exit.
        _libc.prctl(1, signal.SIGKILL, 0, 0, 0)
        _build_root(plan)
        _bring_up_loopback()
        socket.sethostname("grader")
        program = os.fork()
        if program == 0:
            _become_program(processes, plan)
        os._exit(_reap_until(program))
    except BaseException as error:
        sys.stderr.write(f"sandbox: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(SETUP_FAILED)


def _become_program(processes, plan: dict) -> None:
    try:
        os.setsid()
        os.chdir(plan["cwd"])
        processes.unshare(CLONE_NEWUSER)
        _map_user(INNER_UID, 0, 0)
        processes.drop_capabilities()
        _enter(plan)
    except BaseException as error:
        sys.stderr.write(f"sandbox: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(SETUP_FAILED)


def _enter(plan: dict) -> None:
    for name, value in plan["limits"].items():
        kind = getattr(resource, name)
        ceiling = resource.getrlimit(kind)[1]
        value = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
        resource.setrlimit(kind, (value, value))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    os.execve(plan["argv"][0], plan["argv"], plan["environment"])


def _build_root(plan: dict) -> None:
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    root = plan["root"]
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=16m,mode=755")
    os.makedirs(f"{root}/tmp")  # first: the course itself may lie below it, and a later mount would hide that
    _mount("tmpfs", f"{root}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={plan['tmp_mb']}m,mode=1777")
    for path in plan["read_only"]:
        _bind(path, root + path, read_only=True)
    for path in plan["hidden"]:
        if os.path.isdir(root + path):
            _mount("tmpfs", root + path, "tmpfs", MS_NOSUID | MS_NODEV | MS_RDONLY, "size=4k,mode=755")
    os.makedirs(root + plan["cwd"])
    _mount("tmpfs", root + plan["cwd"], "tmpfs", MS_NOSUID | MS_NODEV, f"size={plan['tmp_mb']}m,mode=755")
    for source, target in plan["writable"]:
        _bind(source, root + target, read_only=False)
    for name in ("proc", "dev", "run"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    _mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV)
    _limit_processes(f"{root}/proc/sys/kernel", plan["limits"]["RLIMIT_NPROC"])
    for name in DEVICES:
        _bind(f"/dev/{name}", f"{root}/dev/{name}", read_only=False)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1"),
                         ("stderr", "/proc/self/fd/2")):  # fmt: skip
        os.symlink(target, f"{root}/dev/{name}")
    os.makedirs(f"{root}/dev/shm")
    _mount("tmpfs", f"{root}/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, f"size={plan['tmp_mb']}m,mode=1777")
    for link, target in plan["links"]:
        if not os.path.lexists(root + link):
            os.makedirs(os.path.dirname(root + link), exist_ok=True)
            os.symlink(target, root + link)
    os.makedirs(f"{root}/.outside")
    os.chdir(root)
    _checked(_libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b".outside"), "pivot_root")
    os.chdir("/")
    _checked(_libc.umount2(b"/.outside", MNT_DETACH), "leaving the old root")
    os.rmdir("/.outside")
    _mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _limit_processes(settings: str, most: int) -> None:
    """RLIMIT_NPROC does not bind root, as whom a grader may run. Since Linux 6.14 a pid namespace has a limit of its
    own; before, this would be the limit of the whole machine, which is not ours to change."""
    major, minor = (int(re.match(r"\d+", part)[0]) for part in os.uname().release.split(".")[:2])
    if (major, minor) < (6, 14):
        return
    try:
        Path(settings, "pid_max").write_text(str(most))
    except PermissionError:  # not root: then the other limit binds
        return
    _bind(settings, settings, read_only=True)  # the program's user is the one who may write there


def _bind(source: str, target: str, read_only: bool) -> None:
    """Show `source` at `target` with everything mounted below it."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "a"):
            pass
    _mount(source, target, None, MS_BIND | MS_REC)
    if not read_only:
        return
    attributes = struct.pack("<QQQQ", ATTR_RDONLY | ATTR_NOSUID, 0, 0, 0)
    if _libc.syscall(MOUNT_SETATTR, AT_FDCWD, target.encode(), AT_RECURSIVE, attributes, len(attributes)) != 0:
        # Before Linux 5.12. Flags that came with the mount are locked here and have to be repeated.
        kept = os.statvfs(target).f_flag & 0b111111
        _mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | kept)


def _bring_up_loopback() -> None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 0x1 | 0x40))


def _map_user(inside: int, uid: int, gid: int) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {uid} 1"), ("gid_map", f"{inside} {gid} 1")):
        Path("/proc/self", name).write_text(text)


def _reap_until(program: int) -> int:
    """This process inherits every orphan. The exit code of `program`."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == program:
            return _code(status)


def _waited(pid: int) -> int:
    return _code(os.waitpid(pid, 0)[1])


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    data = None if options is None else options.encode()
    _checked(_libc.mount(*encoded, ctypes.c_ulong(flags), data), f"mounting {target}")


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _load(path: str):
    """The module in the file `path`, without the packages above it."""
    spec = importlib.util.spec_from_file_location("processes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
