"""Starting a program in the strongest sandbox there is here, and ending it with all that it started."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from course_lib.grade import jail
from course_lib.launch import processes

NAMESPACES, WEAK = "namespaces", "weak"
PACKAGE = Path(__file__).resolve().parents[1]
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
SETTINGS = ("alternatives", "fonts", "group", "hosts", "iproute2", "ld.so.cache", "ld.so.conf", "ld.so.conf.d",
            "localtime", "nsswitch.conf", "passwd", "protocols", "services", "ssl/certs")
"""Of /etc, what programs need. The rest can hold secrets, and the sandbox's user may own it."""
WORK = "/box"
HIDDEN_CODE = ("planted",)


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use. Memory is per process, files are per file."""

    memory_mb: int = 8192
    file_mb: int = 64
    tmp_mb: int = 512
    open_files: int = 1024
    processes: int = 2048
    output_bytes: int = 2 * 2**20


@dataclass
class Ended:
    """How a sandbox ended. `code` is None if it was ended from outside, for the reason in `why`."""

    code: int | None
    output: bytes
    why: str = ""
    seconds: float = 0.0


@dataclass
class Box:
    """A running sandbox. `output` is what the program printed, up to the limit; more than that is a flood."""

    process: subprocess.Popen
    limits: Limits
    isolation: str
    folder: str
    output: bytearray = field(default_factory=bytearray)
    flooded: bool = False

    def take_output(self) -> None:
        """Read what is there without waiting."""
        pipe = self.process.stdout
        with contextlib.suppress(BlockingIOError, ValueError):
            while part := os.read(pipe.fileno(), 65536):
                room = self.limits.output_bytes - len(self.output)
                self.output += part[:room]
                if len(part) > room:
                    self.flooded = True
                    return

    def wait(self, seconds: float) -> Ended:
        """Wait for the program, at most `seconds`, and end everything. `why` is "timeout" or "output_flood"."""
        begin, why = time.monotonic(), ""
        with selectors.DefaultSelector() as select:
            select.register(self.process.stdout, selectors.EVENT_READ)
            while self.process.poll() is None:
                left = begin + seconds - time.monotonic()
                if left <= 0:
                    why = "timeout"
                    break
                if select.select(min(left, 0.2)):
                    self.take_output()
                    if not self.flooded and self.process.poll() is None:
                        time.sleep(0.005)  # the end of a pipe is always readable
                if self.flooded:
                    why = "output_flood"
                    break
        code = None if why else self.process.poll()
        self.end()
        return Ended(code, bytes(self.output), why, time.monotonic() - begin)

    def end(self) -> None:
        """Kill whatever is left. The jail ends every process of the sandbox and only then itself."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(12)
            self.process.kill()
        self.process.wait()
        self.take_output()
        self.process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.process.stdout.closed:
            self.end()


def start(argv: Sequence[str], *, work: Path, limits: Limits | None = None, keep: Sequence[int] = (),
          environment: dict[str, str] | None = None) -> Box:  # fmt: skip
    """Run `argv` (the first word is looked for beside this interpreter) in a writable directory.

    It holds the files that are in `work` now, and what the program writes into these is there afterwards. In the strong
    sandbox nothing else is kept, so that no program can fill the disk; in the weak one the directory is `work` itself.
    `keep` are descriptors that it inherits. Nothing of the caller's environment is passed on.
    """
    limits = limits or Limits()
    isolation = level()
    folder = tempfile.mkdtemp(prefix="course-jail-")
    inside = isolation == NAMESPACES
    home = "/tmp" if inside else str(work)
    plan = {
        "namespaces": inside,
        "parent": os.getpid(),
        "processes": processes.__file__,
        "root": folder,
        "argv": [sys.executable, *argv] if argv[0].startswith("-") else list(argv),
        "cwd": WORK if inside else str(work),
        "environment": _environment(home) | (environment or {}),
        "limits": _limits(limits),
        "tmp_mb": limits.tmp_mb,
        "read_only": _read_only() if inside else [],
        "hidden": _hidden() if inside else [],
        "links": _links() if inside else [],
        "writable": [(str(path), f"{WORK}/{path.name}") for path in sorted(work.iterdir())] if inside else [],
    }
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-X", "utf8", jail.__file__, json.dumps(plan)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=tuple(keep),
        start_new_session=True, env={},
    )  # fmt: skip
    os.set_blocking(process.stdout.fileno(), False)
    return Box(process, limits, isolation, folder)


@contextlib.contextmanager
def folder(prefix: str) -> Iterator[Path]:
    """A temporary folder, which is removed in the end."""
    path = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield path
    finally:
        remove(path)


def remove(path: Path) -> None:
    """Remove a folder and what a program made in it: folders too deep for Python to descend, or that forbid it."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        if path.exists():
            subprocess.run([*command, "--", str(path)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@functools.lru_cache
def level() -> str:
    """`namespaces` where a sandbox can really be built here (it is tried), else `weak`."""
    if sys.platform != "linux" or os.uname().machine not in jail.PIVOT_ROOT:
        return WEAK
    if os.environ.get("COURSE_SANDBOX") == WEAK:
        return WEAK
    level_before = globals()["level"]
    globals()["level"] = lambda: NAMESPACES
    try:
        with tempfile.TemporaryDirectory() as work:
            ended = start(["-I", "-c", "print(6 * 7)"], work=Path(work)).wait(30)
    finally:
        globals()["level"] = level_before
    return NAMESPACES if ended.code == 0 and ended.output.strip() == b"42" else WEAK


def path_of(work: Path, name: str) -> str:
    """Where the program sees the file `name` of its work directory."""
    return f"{WORK}/{name}" if level() == NAMESPACES else str(work / name)


def _limits(limits: Limits) -> dict[str, int]:
    return {
        "RLIMIT_AS": limits.memory_mb << 20,
        "RLIMIT_FSIZE": limits.file_mb << 20,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_NPROC": limits.processes,
        "RLIMIT_CORE": 0,
    }


def _environment(home: str) -> dict[str, str]:
    path = os.pathsep.join(dict.fromkeys([str(Path(sys.executable).parent), "/usr/bin", "/bin", "/usr/sbin", "/sbin"]))
    return {
        "PATH": path,
        "HOME": home,
        "LANG": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), *_added_libraries()]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "random",
        "IPYTHONDIR": f"{home}/.ipython",
        "JUPYTER_PLATFORM_DIRS": "1",
        "MPLCONFIGDIR": f"{home}/.matplotlib",
        "MPLBACKEND": "agg",
        "COURSE_DIR": f"{home}/.course",
        "JUPYTER_RUNTIME_DIR": f"{home}/.runtime",
    }


def _read_only() -> list[str]:
    """What a program needs in order to run: the system, this interpreter, and course_lib. Parents come first."""
    interpreter = [sys.base_prefix, sys.prefix, str(Path(sys.executable).resolve().parent)]
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    libraries += _added_libraries()
    wanted = [*SYSTEM, *(f"/etc/{name}" for name in SETTINGS), *interpreter, *libraries, str(PACKAGE)]
    real = [path for path in wanted if os.path.exists(path) and not os.path.islink(path)]
    chosen: list[str] = []
    for path in sorted(set(real), key=lambda p: p.count("/")):
        if not any(path == above or path.startswith(above + "/") for above in chosen):
            chosen.append(path)
    return chosen


def _added_libraries() -> list[str]:
    """Folders of packages that are not the interpreter's own: those of the user (`pip install --user`), which lie in a
    home that the sandbox does not have, and those of PYTHONPATH. No other folder of `sys.path` is one, and least of all
    the one in which the command was given."""
    own = {*site.getsitepackages(), *(sysconfig.get_path(name) for name in ("purelib", "platlib"))}
    names = ("site-packages", "dist-packages")
    return [path for path in dict.fromkeys(sys.path) if os.path.basename(path) in names and path not in own]


def _links() -> list[tuple[str, str]]:
    """Directories of the root that are links, as /bin often is, and a link in the way to this interpreter."""
    links = [path for path in SYSTEM if os.path.islink(path)]
    return [(path, os.readlink(path)) for path in links]


def _hidden() -> list[str]:
    """Folders of course_lib that a submission must not see."""
    return [str(path) for name in HIDDEN_CODE for path in PACKAGE.rglob(name) if path.is_dir()]
