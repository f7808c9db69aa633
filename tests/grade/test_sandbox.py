"""What a program in the sandbox can see, change and leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from course_lib.grade import sandbox
from tests.grade.conftest import command_lines

pytestmark = pytest.mark.skipif(sandbox.level() == sandbox.WEAK, reason="no namespaces here")
ROOT = Path(__file__).resolve().parents[2]


def _run(code: str, work: Path, seconds: float = 30, limits: sandbox.Limits | None = None) -> sandbox.Ended:
    return sandbox.start(["-I", "-c", code], work=work, limits=limits).wait(seconds)


def test_it_sees_no_solutions_no_other_submissions_and_no_secrets(tmp_path: Path) -> None:
    hidden = [str(ROOT / "solutions"), str(ROOT / "tests"), str(ROOT / ".git"), "/etc/shadow", str(tmp_path),
              str(ROOT / "course_lib/lab/exercises/lab04/planted/4.1")]  # fmt: skip
    ended = _run(f"import os; print([p for p in {hidden!r} if os.path.exists(p)])", tmp_path)
    assert ended.output.strip() == b"[]"


def test_it_finds_packages_of_the_user_and_of_pythonpath_and_nothing_beside_them(tmp_path: Path, monkeypatch) -> None:
    """`pip install --user` puts them into a home, and the sandbox has none."""
    packages, work = tmp_path / "home" / "site-packages", tmp_path / "work"
    for folder in (packages, work, tmp_path / "submissions"):
        folder.mkdir(parents=True)
    (packages / "only_there.py").write_text("print(6 * 7)")
    (packages.parent / "secret").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "submissions"), *sys.path, str(packages)])
    code = (f"import only_there, os; print(os.listdir({str(packages.parent)!r}), "
            f"os.path.exists({str(tmp_path / 'submissions')!r}))")  # fmt: skip
    ended = sandbox.start(["-c", code], work=work).wait(30)
    assert ended.output.split(b"\n")[:2] == [b"42", b"['site-packages'] False"], ended.output


def test_it_writes_only_to_its_work_and_tmp(tmp_path: Path) -> None:
    code = ("for p in ('/x', '/usr/x', '/etc/x', '/tmp/x', '/box/x', '/dev/x'):\n"
            "  try: open(p, 'w'); print(p)\n  except OSError: pass")  # fmt: skip
    assert _run(code, tmp_path).output.split() == [b"/tmp/x", b"/box/x"]
    assert list(tmp_path.iterdir()) == []


def test_of_its_work_only_the_files_that_were_there_are_kept(tmp_path: Path) -> None:
    (tmp_path / "report").touch()
    code = ("import os\nopen('report', 'w').write(open('report').read() + 'said')\nopen('more', 'w')\n"
            "for change in (lambda: os.unlink('report'), lambda: os.symlink('/etc/passwd', 'report')):\n"
            "  try: change(); print('changed')\n  except OSError: pass")  # fmt: skip
    assert _run(code, tmp_path).output == b""
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
    assert not (tmp_path / "report").is_symlink() and (tmp_path / "report").read_text() == "said"


@pytest.mark.parametrize("unlinked", [False, True])
def test_it_cannot_fill_the_disk(unlinked: bool, tmp_path: Path) -> None:
    code = (f"import os\nkept = []\ntry:\n  for i in range(40):\n    kept.append(open(f'/box/{{i}}', 'wb'))\n"
            f"    if {unlinked}: os.unlink(f'/box/{{i}}')\n    kept[-1].write(bytes(4 << 20)); kept[-1].flush()\n"
            "except OSError as error: print(error.errno)")  # fmt: skip
    assert _run(code, tmp_path, limits=sandbox.Limits(tmp_mb=16)).output.strip() == b"28"


def test_it_has_no_power_no_input_and_no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_GRADER", "1")
    code = ("import os, sys; s = open('/proc/self/status').read()\n"
            "print([l.split()[1] for l in s.splitlines() if l[:6] in ('CapPrm', 'CapBnd', 'NoNewP')], os.getuid(),\n"
            "      'SECRET_OF_THE_GRADER' in os.environ, repr(sys.stdin.read()))")  # fmt: skip
    said = _run(code, tmp_path).output.decode()
    assert said.split("]")[0] == "['0000000000000000', '0000000000000000', '1'"
    assert said.split("]")[1].split() == ["1000", "False", "''"]


def test_a_detached_grandchild_ends_with_it(tmp_path: Path) -> None:
    mark = f"course-grandchild-{os.getpid()}"
    code = ("import os, subprocess, sys\n"
            f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60) # {mark}'],\n"
            "                 start_new_session=True, stdout=subprocess.DEVNULL)\nprint('left')")  # fmt: skip
    assert _run(code, tmp_path).output.strip() == b"left"
    assert mark not in command_lines()


@pytest.mark.parametrize("code", ["while True: pass", "import signal, time\nfor s in (2, 15): signal.signal(s, "
                                  "signal.SIG_IGN)\nwhile True: time.sleep(1)"])  # fmt: skip
def test_what_never_ends_is_ended(code: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    ended = _run(code, tmp_path, seconds=1)
    assert ended.why == "timeout"
    assert time.monotonic() - begin < 5


def test_all_of_it_is_over_when_it_was_ended(tmp_path: Path) -> None:
    mark = f"course-ended-{os.getpid()}"
    code = ("import subprocess, sys, time\n"
            "for _ in range(20):\n"
            f"  subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60) # {mark}'],\n"
            "                   start_new_session=True, stdout=subprocess.DEVNULL)\ntime.sleep(60)")  # fmt: skip
    assert _run(code, tmp_path, seconds=1).why == "timeout"
    assert mark not in command_lines()


@pytest.mark.parametrize("made", ["for _ in range(3000): os.mkdir('d'); os.chdir('d')",
                                  "os.makedirs('a/b'); open('a/b/c', 'w'); os.chmod('a/b', 0)"])  # fmt: skip
def test_a_folder_is_removed_whatever_was_made_in_it(made: str, tmp_path: Path) -> None:
    with sandbox.folder("course-test-") as folder:
        subprocess.run([sys.executable, "-I", "-S", "-c", f"import os\n{made}"], cwd=folder, check=True)
    assert not folder.exists()


def test_a_flood_of_output_is_stopped(tmp_path: Path) -> None:
    ended = _run("while True: print('x' * 1000)", tmp_path, limits=sandbox.Limits(output_bytes=100_000))
    assert ended.why == "output_flood"
    assert len(ended.output) <= 100_000


def test_memory_is_limited(tmp_path: Path) -> None:
    ended = _run("x = bytearray(1 << 30)", tmp_path, limits=sandbox.Limits(memory_mb=512))
    assert b"MemoryError" in ended.output


def _processes_are_limited() -> bool:
    return os.getuid() != 0 or tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 14)


@pytest.mark.skipif(not _processes_are_limited(), reason="before Linux 6.14 nothing limits the processes of root")
def test_the_number_of_processes_is_limited(tmp_path: Path) -> None:
    code = ("import os, time\ntry: open('/proc/sys/kernel/pid_max', 'w').write('30000')\n"
            "except OSError as error: print(error.errno)\ntry:\n"
            "  for _ in range(500):\n    if os.fork() == 0: time.sleep(60); os._exit(0)\n"
            "except BlockingIOError: print('no more')")  # fmt: skip
    said = _run(code, tmp_path, limits=sandbox.Limits(processes=400)).output.split(b"\n")
    assert said[0] in (b"13", b"30") and said[1] == b"no more", said


@pytest.mark.parametrize("tail", ["", "import time; time.sleep(60)"])
def test_without_namespaces_a_detached_grandchild_ends_too(tail: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sandbox, "level", lambda: sandbox.WEAK)
    mark = f"course-weak-{os.getpid()}"
    code = ("import subprocess, sys\n"
            f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60) # {mark}'],\n"
            f"                 start_new_session=True, stdout=subprocess.DEVNULL)\nprint('left', flush=True)\n{tail}")
    ended = _run(code, tmp_path, seconds=2)
    assert (ended.output.strip(), ended.why) == (b"left", "timeout" if tail else "")
    assert mark not in command_lines()


@pytest.mark.slow
def test_a_shaped_fabric_can_be_made_inside(tmp_path: Path) -> None:
    code = "from course_lib.launch.fabric import shaped_works; print(shaped_works())"
    ended = sandbox.start(["-c", code], work=tmp_path).wait(60)
    assert ended.output.strip() in (b"True", b"False")
