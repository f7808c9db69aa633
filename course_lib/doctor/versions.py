"""Is what the course depends on installed, in a version it knows?"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterable
from importlib import metadata

from course_lib import __version__
from course_lib.doctor.finding import Finding

PYTHON = ">=3.11,<3.14"
NEEDED = ("torch", "numpy", "jupyterlab", "ipykernel", "ipywidgets", "anywidget", "matplotlib", "papermill", "nbformat",
          "nbclient", "jupytext", "cloudpickle", "typer", "rich", "orjson", "nvidia-ml-py")
"""What to look for where the course's own metadata is missing: a checkout that was never installed."""


def examine() -> tuple[Finding, ...]:
    """Python and every package of pyproject.toml. A missing or unsuitable one is a `fail`."""
    return (_python(), *(package(line) for line in requirements()))


def requirements() -> tuple[str, ...]:
    """The lines of `dependencies` in pyproject.toml as they were when the course was installed."""
    try:
        lines = metadata.requires("course_lib") or []
    except metadata.PackageNotFoundError:
        return NEEDED
    return tuple(line for line in lines if "extra ==" not in line)


def package(requirement: str) -> Finding:
    """One package against a line such as `torch<2.14,>=2.11`."""
    name, wanted = _split(requirement)
    needs = f"needs {wanted}" if wanted else ""
    try:
        have = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "fail", name, "not installed", needs, f"pip install '{requirement}'", "pyproject.toml",
                       {"installed": None, "needs": wanted})
    level = "ok" if _suits(have, wanted) else "fail"
    remedy = "" if level == "ok" else f"pip install '{requirement}'"
    return Finding(name, level, name, have, needs, remedy, "pyproject.toml", {"installed": have, "needs": wanted})


def installed(name: str) -> str:
    """The version of an installed package; empty if it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _python() -> Finding:
    have = platform.python_version()
    suits = _suits(have, PYTHON)
    return Finding("python", "ok" if suits else "fail", "python", have, f"needs {PYTHON}; course {__version__}",
                   "" if suits else "make a new environment: make lab PYTHON=python3.12", "pyproject.toml",
                   {"installed": have, "needs": PYTHON, "executable": sys.executable})


def _split(requirement: str) -> tuple[str, str]:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    if name is None:
        raise ValueError(f"{requirement!r} is no requirement: it should begin with a package's name")
    return name[0], _in_order(requirement.removeprefix(name[0]).partition(";")[0].strip())


def _in_order(wanted: str) -> str:
    """Lower bounds first: builds write `<2.14,>=2.11`."""
    return ",".join(sorted(filter(None, wanted.split(",")), reverse=True))


def _suits(have: str, wanted: Iterable[str] | str) -> bool:
    """Whether version `have` satisfies `wanted`; a pre-release counts as its number."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(str(wanted)).contains(have, prereleases=True)
