"""What Linux offers to keep children in hand: adopt orphans, die with the parent, give up power.

On other systems the calls do nothing and say so by returning False; there a detached grandchild of a
rank can outlive a run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time

LINUX = sys.platform == "linux"
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_LINUX_CAPABILITY_VERSION_3 = 0x20080522


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def adopt_orphans() -> bool:
    """Make this process the parent of every descendant whose own parent dies."""
    return LINUX and _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def die_with_parent(parent: int) -> bool:
    """Be killed when the parent process ends, however it ends. Exits at once if it already has."""
    done = LINUX and _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    if os.getppid() != parent:
        os._exit(1)
    return done


def unshare(flags: int) -> None:
    """Leave the namespaces named by the `CLONE_NEW*` flags. Raises `OSError`."""
    _checked(_libc().unshare(flags), "unshare")


def become_root_of_new_user_namespace(extra_flags: int = 0) -> None:
    """Enter a user namespace in which this user is root, with further namespaces owned by it.

    Raises `OSError` where the kernel or a container forbids it.
    """
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | extra_flags)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as f:
            f.write(text)


def drop_capabilities() -> None:
    """Give up every capability for good: bounding, ambient, permitted; no set-uid program restores them."""
    libc = _libc()
    for cap in range(64):
        if libc.prctl(_PR_CAPBSET_DROP, cap, 0, 0, 0) != 0:
            break  # past the last capability this kernel knows
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_LINUX_CAPABILITY_VERSION_3, 0)
    _checked(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def children() -> list[int]:
    """Process ids of this process's direct children, orphans it adopted included."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as f:
            return [int(pid) for pid in f.read().split()]
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process; False where the system does not say."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def watch(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends, where the system has one."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def reap(pid: int, limit_s: float) -> int:
    """The exit code of a child (negative: the signal that ended it). Kills one that lives on after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def end_descendants(known: set[int] = frozenset(), limit_s: float = 10.0) -> None:
    """Kill and reap every descendant. Grandchildren fall to this process as their parents die, so
    the loop ends when there is nobody left. `known` are children to kill where /proc is missing."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for pid in set(children()) | set(known):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)
