"""What functions on ranks can return, raise, print and leave, and that the sentence names rank and remedy."""

from __future__ import annotations

import contextlib
import glob
import math
import os
import signal
import subprocess
import sys
import threading
import time

import numpy
import pytest

from course_lib.launch import RankDied, RankFailed, RunError, RunTimeout, context, run


class UnreadableHere:
    def __reduce__(self):
        return eval, ("1 / 0",)


def _generator():
    yield 1


async def _coroutine():
    return 1


@pytest.mark.parametrize("fn", [threading.Lock, _generator, _coroutine])
def test_a_result_that_cannot_travel_is_named_with_a_remedy(fn):
    with pytest.raises(RankFailed, match=r"rank 0 failed(.|\n)*returned, a \w+, cannot travel(.|\n)*Return numbers"):
        run(lambda: fn(), ranks=1, fabric="loopback")


def test_a_result_that_cannot_be_made_again_names_its_rank():
    with pytest.raises(RunError, match=r"what rank 1 returned cannot be made again here \(ZeroDivisionError"):
        run(lambda: UnreadableHere() if context().rank else 0, ranks=2, fabric="loopback")


@pytest.mark.parametrize("child_raises", [False, True])
def test_a_process_that_the_function_forked_is_not_the_rank(child_raises):
    def fork():
        if os.fork() == 0:
            if child_raises:
                raise ValueError("of the child")
            return "child"
        time.sleep(0.3)
        return "rank"

    assert run(fork, ranks=1, fabric="loopback") == ["rank"]


def test_a_rank_without_standard_output_delivers():
    def close():
        sys.stdout = sys.stderr = None
        os.closerange(1, 3)
        return 5

    assert run(close, ranks=1, fabric="loopback") == [5]


def _write_everywhere(what):
    for fd in range(3, 40):
        with contextlib.suppress(OSError):
            os.write(fd, what)
    time.sleep(60)


@pytest.mark.parametrize("what", [b"no message at all", (3).to_bytes(8, "little") + b"abc"])
def test_a_rank_that_writes_to_every_descriptor_is_the_one_to_end(what):
    start = time.monotonic()
    with pytest.raises(RankDied, match="rank 1"):
        run(lambda: _write_everywhere(what) if context().rank else 0, ranks=2, fabric="loopback", timeout_s=30)
    assert time.monotonic() - start < 15


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says whether a process is stopped")
def test_a_rank_that_is_stopped_or_does_not_answer_is_said():
    def stop():
        os.kill(os.getpid(), signal.SIGSTOP)

    def ignore():
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(60)

    with pytest.raises(RunTimeout, match="rank 0 was stopped by a signal"):
        run(stop, ranks=1, fabric="loopback", timeout_s=1)
    with pytest.raises(RunTimeout, match="rank 0 does not say where it stands: its code has taken signal SIGUSR1"):
        run(ignore, ranks=1, fabric="loopback", timeout_s=1)


def test_a_long_line_does_not_take_long(capsys):
    start = time.monotonic()
    run(lambda: sys.stdout.write("y" * (40 << 20)) and None, ranks=1, fabric="loopback")
    assert time.monotonic() - start < 8  # joined anew with every part it took twenty
    assert len(capsys.readouterr().out) == (40 << 20) + len("[rank 0] \n")


def _client(code, **environment):
    done = subprocess.run([sys.executable, "-c", "import os\nfrom course_lib.launch import run\n" + code], text=True,
                          capture_output=True, timeout=60, env={**os.environ, **environment})
    return done.stdout, done.stderr


def test_output_that_cannot_be_shown_does_not_end_the_run():
    said, error = _client("print(run(lambda: os.write(1, b'\\xc3\\xa9\\n'), ranks=1, fabric='loopback'))",
                          PYTHONIOENCODING="ascii")
    assert said.splitlines() == ["[rank 0] \\xe9", "[3]"], error


def test_a_folder_that_is_gone_is_said(monkeypatch, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ValueError, match="has been removed"):
        run(int, ranks=1, fabric="loopback")


def test_a_run_whose_server_was_killed_ends_and_leaves_no_folder(tmp_path):
    code = ("import time, glob, signal\ndef end():\n"
            "    server = open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1]\n"
            "    os.kill(int(server), signal.SIGKILL)\n    return 1\n"
            "print(run(end, ranks=1, fabric='loopback'), run(int, ranks=1, fabric='loopback'))")
    said, error = _client(code, TMPDIR=str(tmp_path))
    assert said.split() == ["[1]", "[0]"], error
    assert glob.glob(f"{tmp_path}/course-run-*") == []


def test_too_few_descriptors_are_a_sentence_with_a_remedy():
    import resource

    def many():
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))

    code = ("import course_lib.launch as l\ntry: run(int, ranks=20, fabric='loopback')\n"
            "except l.RunNotStarted as error: print(error)")
    done = subprocess.run([sys.executable, "-c", "import os\nfrom course_lib.launch import run\n" + code], text=True,
                          capture_output=True, timeout=60, preexec_fn=many)
    assert "Too many open files" in done.stdout and "raise `ulimit -n`" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("timeout_s", [math.inf, math.nan, 1e12, "5", None, True, -1])
def test_a_time_limit_that_no_clock_holds_is_refused(timeout_s):
    with pytest.raises(ValueError, match="seconds above 0, and 1000000 at most"):
        run(int, ranks=1, fabric="loopback", timeout_s=timeout_s)


def test_numbers_of_numpy_are_numbers():
    assert run(int, ranks=numpy.int64(2), fabric="loopback", timeout_s=numpy.float32(30)) == [0, 0]
