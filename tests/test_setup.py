"""The Makefile and .ci/run, tried with stand-ins for python, id and jupyter: nothing is downloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import course_lib

ROOT = Path(__file__).resolve().parents[1]
REAL_TOOLS = ("sh", "bash", "make", "sed", "touch", "test", "dirname", "cat", "chmod", "mkdir", "timeout")

# A python whose `-m venv DIR` makes a DIR with this same stand-in in it, and which notes every other call.
FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
  "-c import sys, venv"*) test -e "{suitable}" ;;
  "-c import tomllib"*) echo "torch>=2.11,<2.14" ;;
  "-m venv") mkdir -p .venv/bin && cat "$0" > .venv/bin/python && chmod +x .venv/bin/python
             printf '#!/bin/sh\\necho "jupyter $*" >> "{log}"\\n' > .venv/bin/jupyter && chmod +x .venv/bin/jupyter ;;
  "--version "*) echo "Python 3.12.0" ;;
  *) echo "$*" >> "{log}" ;;
esac
"""


class Checkout:
    """A copy of the set-up files and a PATH that holds only stand-ins and a few real tools."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.log = folder / "it's here", folder / "bin", folder / "calls"
        (self.folder / "labs").mkdir(parents=True)
        (self.folder / ".ci").mkdir()
        self.bin.mkdir()
        for name in ("Makefile", "pyproject.toml", ".ci/run"):
            shutil.copy(ROOT / name, self.folder / name)
        for tool in REAL_TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or pytest.skip(f"no {tool} on this machine"))
        self.tool("uname", "echo Linux")
        self.user(1000)

    def tool(self, name: str, script: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)  # it may be a link to the machine's own tool
        path.write_text(script if script.startswith("#!") else f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def user(self, uid: int) -> None:
        self.tool("id", f"echo {uid}")

    def python(self, name: str, suitable: bool = True) -> None:
        self.tool(name, FAKE_PYTHON.format(suitable=self.bin / "sh" if suitable else "/nowhere", log=self.log))

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(self.bin), "HOME": str(self.folder)}
        return subprocess.run(command, cwd=self.folder, env=env, text=True, capture_output=True, timeout=60)

    def calls(self) -> list[str]:
        """What was called since the last look."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line for line in lines if line != "-m pip --version"]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


TESTS = ["-m pytest -m not slow and not gpu and (timing or browser)",
         "-m pytest -n 2 --dist loadfile -m not slow and not gpu and not timing and not browser"]


@pytest.mark.parametrize(("alone", "rest", "passes"), [(0, 0, True), (0, 5, True), (5, 0, True), (5, 5, False),
                                                       (1, 0, False), (0, 1, False), (0, 2, False)])
def test_both_runs_of_the_tests_count(checkout: Checkout, alone: int, rest: int, passes: bool) -> None:
    checkout.python("python3")
    assert checkout.run("make", "test").returncode == 0
    (checkout.folder / ".venv/bin/python").write_text(
        f'#!/bin/sh\ncase "$*" in *"-n 2"*) exit {rest};; "-m pytest"*) exit {alone};; esac\n')
    assert (checkout.run("make", "test").returncode == 0) == passes


def test_first_use_installs_and_the_second_does_not(checkout: Checkout) -> None:
    checkout.python("python3")
    assert checkout.run("make", "test").returncode == 0
    assert checkout.calls() == ["-m pip install -e .[test]", *TESTS]
    checkout.run("make", "test")
    assert checkout.calls() == TESTS


def test_a_changed_pyproject_installs_again_into_the_same_environment(checkout: Checkout) -> None:
    checkout.python("python3")
    checkout.run("make", "test")
    keep = checkout.folder / ".venv/keep"
    keep.touch()
    later = (checkout.folder / ".venv/.installed").stat().st_mtime + 5
    os.utime(checkout.folder / "pyproject.toml", (later, later))
    checkout.calls()
    checkout.run("make", "test")
    assert checkout.calls()[0] == "-m pip install -e .[test]"
    assert keep.exists()


def test_an_interrupted_installation_is_taken_up_again(checkout: Checkout) -> None:
    checkout.python("python3")
    checkout.run("make", "test")
    (checkout.folder / ".venv/.installed").unlink()
    checkout.calls()
    checkout.run("make", "test")
    assert checkout.calls()[0] == "-m pip install -e .[test]"


def test_an_unsuitable_python3_is_passed_over(checkout: Checkout) -> None:
    checkout.python("python3", suitable=False)
    checkout.python("python3.12")
    assert checkout.run("make", "test").returncode == 0


def test_without_a_suitable_python_one_sentence_says_what_to_do(checkout: Checkout) -> None:
    checkout.python("python3", suitable=False)
    done = checkout.run("make", "test")
    assert done.returncode != 0
    assert "Python 3.11, 3.12 or 3.13" in done.stderr and "make lab PYTHON=" in done.stderr
    assert not (checkout.folder / ".venv").exists()


def test_the_named_interpreter_is_used(checkout: Checkout) -> None:
    checkout.python("python3", suitable=False)
    checkout.python("mine")
    assert checkout.run("make", "test", "PYTHON=mine").returncode == 0
    assert checkout.run("make", "-B", "test", "PYTHON=other").returncode == 0, "a good .venv needs no interpreter"


def test_a_torch_index_is_used_for_torch_alone(checkout: Checkout) -> None:
    checkout.python("python3")
    checkout.run("make", "test", "TORCH_INDEX=file:///wheels")
    assert checkout.calls()[:2] == [
        "-m pip install --index-url file:///wheels torch>=2.11,<2.14",
        "-m pip install -e .[test]",
    ]


@pytest.mark.parametrize(("uid", "flag"), [(0, "--allow-root "), (1000, "")])
def test_jupyterlab_is_told_about_root_only_as_root(checkout: Checkout, uid: int, flag: str) -> None:
    checkout.python("python3")
    checkout.user(uid)
    assert checkout.run("make", "lab", "LAB_ARGS=--no-browser").returncode == 0
    assert checkout.calls()[-1] == f"jupyter lab {flag}--no-browser"


@pytest.mark.parametrize("uid", [0, 1000])
def test_ci_goes_on_where_chromium_cannot_be_installed(checkout: Checkout, uid: int) -> None:
    checkout.python("python3")
    checkout.user(uid)
    checkout.tool("apt-get", "exit 100")
    done = checkout.run("bash", ".ci/run")
    assert done.returncode == 0, done.stderr
    assert "chromium" in done.stdout and "skip" in done.stdout
    assert checkout.calls()[-2:] == TESTS


def test_ci_fails_when_the_tests_fail(checkout: Checkout) -> None:
    checkout.tool("make", "exit 3")
    assert checkout.run("bash", ".ci/run").returncode == 3


def test_what_the_package_promises() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.14"
    assert "torch>=2.11,<2.14" in project["dependencies"]
    assert project["scripts"] == {"course": "course_lib.cli:main"}
    assert course_lib.__version__ == "0.1.0"
