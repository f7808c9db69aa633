"""Cores, memory, free space and free ports."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path

from course_lib.doctor.finding import Finding

GB = 2**30
LITTLE_SPACE, TOO_LITTLE_SPACE = 2 * GB, GB // 4
LITTLE_MEMORY = 3 * GB
PORTS = {8888: "JupyterLab's first choice", 29500: "torchrun's default"}
RANKS = 8


def examine() -> tuple[Finding, ...]:
    """Nothing here takes longer than a moment."""
    return (system(), cores(), memory(), space(Path(tempfile.gettempdir())), ports())


def system() -> Finding:
    return Finding("system", "ok", "system", f"{platform.system()} {platform.release()}", platform.machine())


def cores() -> Finding:
    """Cores this process may use, and how busy they are. With one core, ranks cannot overlap anything."""
    count = usable_cores()
    try:
        load = os.getloadavg()[0]
    except OSError:
        load = 0.0
    busy = load > count
    level = "warn" if count < 2 or busy else "ok"
    remedy = ("the labs need two cores for their measurements" if count < 2 else
              "other programs take the cores: wait, or close them, before you trust a timing" if busy else "")
    return Finding("cores", level, "cores", f"{count:g}", f"load {load:.1f} over the last minute", remedy, "",
                   {"usable": count, "load": load})


def usable_cores() -> float:
    """The smaller of the affinity of this process and the quota of its container."""
    count = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return min(count, int(quota) / int(period))
    except (OSError, ValueError):
        return count


def memory() -> Finding:
    """Free memory where the system tells it; each rank holds torch, about 300 MB."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return Finding("memory", "note", "memory", "not known", "this system does not tell")
    free = _available() or free
    short = free < LITTLE_MEMORY
    return Finding("memory", "warn" if short else "ok", "memory", f"{free / GB:.1f} GB free", f"of {total / GB:.1f} GB",
                   "close other programs, or start fewer ranks" if short else "", "", {"free": free, "total": total})


def space(folder: Path) -> Finding:
    """Traces and the files by which ranks find each other are written to the temporary folder."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding("temp", "fail", "temporary folder", "cannot be written", f"{folder}: {error.strerror}",
                       "set TMPDIR to a folder that can be written", "", {"free": 0})
    level = "fail" if free < TOO_LITTLE_SPACE else "warn" if free < LITTLE_SPACE else "ok"
    remedy = "" if level == "ok" else "free some space, or set TMPDIR to another disk"
    return Finding("temp", level, "temporary folder", f"{free / GB:.1f} GB free", str(folder), remedy, "",
                   {"free": free})


def ports() -> Finding:
    """Whether ranks find ports on this machine, and which well-known ones are taken."""
    try:
        with ExitStack() as stack:
            for _ in range(RANKS):
                _listen(stack, 0)
    except OSError as error:
        return Finding("ports", "fail", "free ports", "none", f"no port on 127.0.0.1 can be opened: {error.strerror}",
                       "allow programs to listen on 127.0.0.1", "", {"taken": []})
    taken = [port for port in PORTS if not _free(port)]
    detail = "; ".join(f"{port} ({PORTS[port]}) is taken" for port in taken)
    remedy = "another is chosen by JupyterLab; give torchrun --master-port" if taken else ""
    return Finding("ports", "note" if taken else "ok", "free ports", f"{RANKS} opened on 127.0.0.1",
                   detail, remedy, "", {"taken": taken})


def _free(port: int) -> bool:
    try:
        with ExitStack() as stack:
            _listen(stack, port)
    except OSError:
        return False
    return True


def _listen(stack: ExitStack, port: int) -> None:
    listener = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(1)


def _available() -> int:
    """What Linux would give to a new program: more than what is idle, since caches can be dropped."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0
