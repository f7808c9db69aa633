"""From the command line and from plain papermill, and the ways in which a notebook breaks off."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from course_lib.grade import engine
from course_lib.grade.template import Submission, Template
from course_lib.lab.notebook import as_text, learner_notebook, read_solution

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
ROOT = Path(__file__).resolve().parents[2]
SOLUTION = ROOT / "solutions" / "04_gradient_buckets.py"
COURSE = [sys.executable, "-c", "from course_lib.cli import main; main()"]


def _course(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([*COURSE, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


def test_plain_papermill_judges_one_file(tmp_path: Path) -> None:
    handed = tmp_path / "alice.ipynb"
    handed.write_text(as_text(learner_notebook(SOLUTION, read_solution(SOLUTION))))
    command = [sys.executable, "-m", "papermill", str(ROOT / "labs" / "04_gradient_buckets.ipynb"), "out.ipynb", "-p",
               "submission", str(handed)]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    assert done.returncode == 0, done.stderr
    cells = nbformat.read(tmp_path / "out.ipynb", as_version=4).cells
    said = {cell.id: str(cell.outputs) for cell in cells if cell.cell_type == "code" and cell.outputs}
    assert set(said) == {"begin"}
    assert "stub_left" in said["begin"]


@pytest.mark.parametrize("lab", [path.name[:2] for path in sorted(SOLUTION.parent.glob("[0-9][0-9]_*.py"))])
def test_the_self_check_passes(lab: str) -> None:
    done = _course("grade", lab, "--self-check", cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert "✘" not in done.stdout


BREAKS = {
    "import sys\nsys.exit(0)": "early_exit",
    "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)": "kernel_died",
    "while True: print('x' * 1000)": "output_flood",
    "import signal\nsignal.signal(2, signal.SIG_IGN)\nwhile True: pass": "timeout",
}


@pytest.mark.parametrize(("line", "outcome"), BREAKS.items(), ids=BREAKS.values())
def test_the_notebooks_run_names_the_cell(
    template: Template, submission: Callable[..., Submission], sources: dict, line: str, outcome: str, monkeypatch
) -> None:
    monkeypatch.setattr(engine, "CELL_SECONDS", 30.0)
    run = engine.run(template, submission({"4.2": f"{sources['4.2']}\n{line}"}), failed=["4.2"])
    assert run.outcome == outcome, run
    assert "exercise 4.2" in run.sentence
    cells = {cell.id: cell for cell in run.notebook.cells}
    assert cells["assign-check"].execution_count
    assert not cells["finish"].execution_count
    assert cells["finish"].metadata.papermill.status == "not run"
