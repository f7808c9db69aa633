"""Every lab as people run it: the learner's copy stops at its first exercise, the solution runs to its end.

`make test` runs labs 00 and 04 on the paced wire (the browser tests run them on the best one);
`make test-all` runs every lab on both.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from course_lib.lab.notebook import read_solution
from course_lib.launch.fabric import shaped_works

REPOSITORY = Path(__file__).resolve().parents[1]
LABS = sorted((REPOSITORY / "labs").glob("[0-9][0-9]_*.ipynb"))
SOLUTIONS = sorted((REPOSITORY / "solutions").glob("[0-9][0-9]_*.py"))
SHOWN = {"00_start_here", "04_gradient_buckets"}
"""What `make test` runs; the others wait for `make test-all`."""


def papermill(source: Path, folder: Path, **parameters) -> tuple[subprocess.CompletedProcess, nbformat.NotebookNode]:
    """Run a notebook in `folder` from the command line."""
    out = folder / "out.ipynb"
    options = [part for name, value in parameters.items() for part in ("-p", name, str(value))]
    done = subprocess.run([sys.executable, "-m", "papermill", str(source), str(out), "--cwd", str(folder),
                           "--no-progress-bar", *options], capture_output=True, text=True, timeout=280)
    return done, nbformat.read(out, as_version=4)


def quick_copy(solution: Path, to: Path) -> nbformat.NotebookNode:
    """Write the solution as a notebook that runs in quick mode without being told, and return it."""
    notebook = read_solution(solution)
    cell = next(c for c in notebook.cells if "parameters" in c.metadata.get("tags", []))
    cell.source = cell.source.replace("quick = False", "quick = True")
    nbformat.write(notebook, to)
    return notebook


def only_shown(paths: list[Path], shown: set[str] = SHOWN):
    return [pytest.param(p, id=p.stem, marks=() if p.stem in shown else pytest.mark.slow) for p in paths]


@pytest.mark.parametrize("lab", only_shown(LABS))
def test_learners_lab_stops_at_its_first_exercise_with_its_name(lab, tmp_path):
    done, out = papermill(lab, tmp_path, quick=True)
    first = next(c.metadata.exercise for c in out.cells if "exercise" in c.metadata)
    assert done.returncode != 0
    errors = [o for c in out.cells for o in c.get("outputs", []) if o.output_type == "error"]
    assert len(errors) == 1 and f"exercise {first}" in errors[0].evalue


SHAPED = pytest.mark.skipif(not shaped_works(), reason="ip and tc do not work in a user namespace here")


@pytest.mark.parametrize("fabric", ["paced", pytest.param("shaped", marks=[pytest.mark.slow, SHAPED])])
@pytest.mark.parametrize("solution", only_shown(SOLUTIONS))
def test_solution_runs_to_its_end(solution, fabric, tmp_path):
    source = tmp_path / "solution.ipynb"
    nbformat.write(read_solution(solution), source)
    done, out = papermill(source, tmp_path, quick=True, fabric=fabric, device="cpu")
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(c.execution_count for c in out.cells if c.cell_type == "code" and c.source.strip())
    text = "".join(o.get("text", "") + str(o.get("data", {}).get("text/plain", ""))
                   for c in out.cells for o in c.get("outputs", []))
    assert fabric in text or solution.stem != "04_gradient_buckets"  # its pictures say which wire carried them
    on_devices = any(c.id == "real" for c in out.cells)
    assert on_devices == (solution.stem in ("04_gradient_buckets", "12_zero")) == ("parameters apart by" in text)


@pytest.mark.slow
@pytest.mark.parametrize("solution", SOLUTIONS, ids=[path.stem for path in SOLUTIONS])
def test_solution_runs_under_nbval(solution, tmp_path):
    quick_copy(solution, tmp_path / "lab.ipynb")
    done = subprocess.run([sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env", "-q",
                           "--nbval-cell-timeout=120", "-p", "no:cacheprovider", "lab.ipynb"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]
