"""The command line itself: what it lists, how it refuses, and that it starts quickly."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from course_lib import __version__
from course_lib.cli import app


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_version() -> None:
    assert run("--version").output == f"course {__version__}\n"


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_lists_the_commands(arguments: tuple[str, ...]) -> None:
    assert "build" in run(*arguments).output


def test_an_unknown_command_is_a_matter_of_usage() -> None:
    assert run("bild").exit_code == 2


def test_a_failure_is_one_sentence_on_standard_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "course_lib.cli", "build"], cwd=tmp_path, text=True, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("course: there is no solutions/ in") and done.stderr.count("\n") == 1


def test_it_starts_in_a_small_multiple_of_what_python_takes() -> None:
    """A ratio, in alternation: seconds alone say little on a busy machine. Importing torch would be over 50."""

    def seconds(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        return time.perf_counter() - start

    ratios = [seconds("import course_lib.cli") / seconds("pass") for _ in range(5)]
    assert statistics.median(ratios) < 10, ratios
