"""The instructor's sources of lab 04, and submissions made of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from course_lib.grade.template import Submission, Template
from course_lib.lab.notebook import as_text, read_solution

ROOT = Path(__file__).resolve().parents[2]
SOLUTION = ROOT / "solutions" / "04_gradient_buckets.py"


@pytest.fixture(scope="session")
def template() -> Template:
    return Template.load("04", ROOT)


@pytest.fixture(scope="session")
def sources() -> dict[str, str]:
    """The solution's cells by exercise."""
    return {c.metadata.exercise: c.source for c in read_solution(SOLUTION).cells if "exercise" in c.metadata}


@pytest.fixture(scope="session")
def submission(sources: dict[str, str]) -> Callable[..., Submission]:
    """`submission({"4.1": source})`: the solution, but for these cells."""
    return lambda changed=None: Submission(sources | (changed or {}), ())


@pytest.fixture(scope="session")
def notebook() -> Callable[..., str]:
    """`notebook({"4.1": source})`: a solved notebook's text with other cells, as a learner would hand it in."""

    def made(changed: dict[str, str] | None = None, tags: dict[str, list[str]] | None = None) -> str:
        full = read_solution(SOLUTION)
        for cell in full.cells:
            if (number := cell.metadata.get("exercise")) in (changed or {}):
                cell.source = changed[number]
            if cell.id in (tags or {}):
                cell.metadata.tags = tags[cell.id]
        return as_text(full)

    return made


def command_lines() -> str:
    """Of all processes there are, but for those of the tests."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_text(errors="replace"))
        except OSError:
            continue
    return "\n".join(line for line in lines if "pytest" not in line)
