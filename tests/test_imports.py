"""Which parts import without torch, and how quickly. Each import runs in a fresh interpreter."""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import time

import pytest

WITHOUT_TORCH = ["", "cli", "timeline", "overlap", "record", "simulate", "plan", "trace", "show", "lab", "lab.build",
                 "doctor"]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("part", WITHOUT_TORCH)
def test_imports_without_torch(part: str) -> None:
    name = f"course_lib.{part}".rstrip(".")
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} does not exist yet")
    done = python(f"import sys, {name}; print('torch' in sys.modules)")
    assert done.stdout.strip() == "False", done.stdout + done.stderr


def test_course_help_does_not_import_torch() -> None:
    done = python(
        "import sys, atexit; from course_lib.cli import main; sys.argv = ['course', '--help'];"
        "atexit.register(lambda: print('torch' in sys.modules)); main()"
    )
    assert done.returncode == 0, done.stderr
    assert "build" in done.stdout and done.stdout.strip().endswith("False")


def test_the_package_imports_nothing_of_its_own() -> None:
    done = python("import sys; before = set(sys.modules); import course_lib; print(*(set(sys.modules) - before))")
    assert done.stdout.split() == ["course_lib"]


def test_importing_the_package_costs_next_to_nothing() -> None:
    """A ratio to the bare interpreter, in alternation: seconds alone say little on a busy machine."""

    def seconds(code: str) -> float:
        start = time.perf_counter()
        python(code)
        return time.perf_counter() - start

    ratios = [seconds("import course_lib") / seconds("pass") for _ in range(7)]
    assert statistics.median(ratios) < 1.5, ratios
