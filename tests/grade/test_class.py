"""A whole class is handed in and graded, three times over, alone and beside a process that takes a core."""

from __future__ import annotations

import csv
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
import pytest

from course_lib.grade.template import Template
from course_lib.lab.notebook import as_text, learner_notebook, read_solution
from tests.grade.conftest import ROOT, SOLUTION

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]
COURSE = [sys.executable, "-c", "from course_lib.cli import main; main()"]

NO_BYTES = """
import torch.distributed
class W:
    def wait(self, *a): return True
    def is_completed(self): return True
torch.distributed.all_reduce = lambda *a, **k: W()
"""
METRIC = """
import course_lib.score as s
s.fair_score = lambda *a, **k: s.Score('F', 1.0)
def assign_buckets(sizes_bytes, cap_bytes):
    return [[i for i, _ in sizes_bytes]]
"""


@dataclass(frozen=True)
class Member:
    """What is handed in, the outcomes it may have, and by exercise the mistake whose hint it must be given."""

    text: str
    outcomes: frozenset[str]
    mistakes: dict[str, str] = field(default_factory=dict)


def members(notebook: Callable[..., str], sources: dict[str, str], template: Template) -> Iterator[tuple[str, Member]]:
    """The class. Planted answers to different exercises share a notebook: each exercise is judged by itself."""
    stub = as_text(learner_notebook(SOLUTION, read_solution(SOLUTION)))
    # Beside a busy process the measurement may find no verdict. That is an outcome of its own and never a low grade.
    yield "solution", Member(notebook(), frozenset({"ok", "timing_unstable"}))
    yield "stub", Member(stub, frozenset({"stub_left"}))
    yield "loop", Member(notebook({"4.2": sources["4.2"] + "\nwhile True: pass"}), frozenset({"timeout"}))
    yield "leaves", Member(notebook({"4.2": sources["4.2"] + "\nimport sys\nsys.exit(0)"}), frozenset({"early_exit"}))
    yield "metric", Member(notebook({"4.1": METRIC}), frozenset({"failed_checks"}))
    yield "skipped", Member(notebook({"4.1": METRIC}, {"assign-check": ["skip-execution"]}),
                            frozenset({"failed_checks"}))
    yield "no_bytes", Member(notebook({"4.3": sources["4.3"] + NO_BYTES}), frozenset({"failed_checks"}))
    yield "text", Member("This is no notebook.", frozenset({"unreadable"}))
    planted = [[(number, each) for each in exercise.planted] for number, exercise in template.exercises.items()]
    for place, together in enumerate(itertools.zip_longest(*planted)):
        wrong = dict(filter(None, together))
        yield f"planted{place:02d}", Member(notebook({n: each.source for n, each in wrong.items()}),
                                            frozenset({"failed_checks"}), {n: e.mistake for n, e in wrong.items()})


@contextmanager
def hog(wanted: bool) -> Iterator[None]:
    """A process that takes all of a core."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if wanted else None
    try:
        yield
    finally:
        if busy:
            busy.kill()
            busy.wait()


@pytest.mark.parametrize("beside_a_hog", [False, True], ids=["alone", "beside a hog"])
@pytest.mark.parametrize("time", [1, 2, 3])
def test_everybody_gets_the_right_outcome(time: int, beside_a_hog: bool, tmp_path: Path, notebook: Callable[..., str],
                                          sources: dict[str, str], template: Template) -> None:
    everybody = dict(members(notebook, sources, template))
    out, rows, parts = tmp_path / "out", {}, {}
    for group, planted in (("others", False), ("planted", True)):
        place, records = tmp_path / group, out / group
        place.mkdir()
        for name, member in everybody.items():
            if name.startswith("planted") == planted:
                (place / f"{name}.ipynb").write_text(member.text)
        # What their notebooks show is seen once; what they are judged by, every time.
        options = ["--no-notebook"] if planted and time > 1 else []
        with hog(beside_a_hog):
            done = subprocess.run([*COURSE, "grade", "04", str(place), "--out", str(records), "--jobs", "2", *options],
                                  cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
        print(done.stdout)
        assert done.returncode in (0, 1), done.stderr
        with open(records / "grades.csv", newline="") as file:
            rows |= {row["id"]: row for row in csv.DictReader(file)}
        journal = [json.loads(line)["judgement"] for line in (records / "journal.jsonl").read_text().splitlines()]
        parts |= {judgement["id"]: {part["id"]: part for part in judgement["parts"]} for judgement in journal}

    assert {name: rows[name]["status"] for name, member in everybody.items()
            if rows[name]["status"] not in member.outcomes} == {}
    unhinted = {(name, number): parts[name][number]["hint"] for name, member in everybody.items()
                for number, mistake in member.mistakes.items()
                if parts[name][number]["hint"] != template.exercises[number].mistakes[mistake]}
    assert unhinted == {}
    assert rows["leaves"]["points"] == rows["loop"]["points"] == "10", "work done before a failure keeps its points"
    assert "Too few bytes" in rows["no_bytes"]["note"]
    assert float(rows["stub"]["points"]) == 0
    if rows["solution"]["status"] == "ok":
        assert rows["solution"]["points"] == rows["solution"]["max_points"]
        assert float(rows["solution"]["fair_score"]) > 0.3
    else:
        assert rows["solution"]["points"] == "" and beside_a_hog, "an idle machine gives a verdict"
    assert (out / "others" / "feedback" / "solution.html").read_text().count("data:image/png") == 2
    assert nbformat.read(out / "others" / "notebooks" / "solution.ipynb", as_version=4).cells
