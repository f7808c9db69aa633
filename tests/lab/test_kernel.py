"""The same calls in a real kernel without a frontend, as papermill and CI run them."""

from __future__ import annotations

from pathlib import Path

import nbformat
import papermill
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from course_lib.lab.notebook import NOTEBOOK_METADATA

START = "from course_lib import lab\nlab.begin()"
STUB = 'def assign_buckets(sizes_bytes, cap_bytes):\n    raise NotImplementedError("exercise 4.1")'
WRONG = "def assign_buckets(sizes_bytes, cap_bytes):\n    return [[index] for index, _ in dict(sizes_bytes).items()]"
CHECK = 'lab.check("4.1", assign_buckets)'


def notebook(*cells: str) -> nbformat.NotebookNode:
    return new_notebook(cells=[new_code_cell(cell) for cell in cells], metadata=NOTEBOOK_METADATA)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COURSE_DIR")


def test_what_a_learner_sees(tmp_path: Path, quiet: None) -> None:
    cells = notebook(
        START,
        CHECK,
        "unknown_name",
        STUB,
        CHECK,
        WRONG,
        CHECK,
        'lab.predict("4.a", "How many?", unit="MB")\nlab.predict("4.b", "Which?", choices=["x", "y"])',
        'lab.hint("4.1")',
        'lab.compare("4.a", 3)',
        "import os, sys; (os.path.exists('.course/progress.json'), 'torch' in sys.modules)",
    )
    NotebookClient(cells, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}).execute()
    _, unrun, unknown, _, unwritten, _, failed, asked, hinted, compared, kept = [cell.outputs for cell in cells.cells]

    assert unrun[0].traceback == ["`assign_buckets` does not exist yet: run the cell of exercise 4.1 first."]
    assert len(unknown[0].traceback) > 1, "other missing names keep their traceback"
    assert unwritten[0].ename == "CheckFailed"
    assert len(unwritten[0].traceback) == 1 and "exercise 4.1 is not written yet" in unwritten[0].traceback[0]
    table, error = failed
    assert "<table" in table.data["text/html"] and "What this looks like" in table.data["text/plain"]
    assert len(error.traceback) == 1 and "✘ exercise 4.1" in error.traceback[0]
    assert all("application/vnd.jupyter.widget-view+json" in output.data for output in asked)
    assert "no prediction yet" in asked[0].data["text/plain"] and "How many?" in asked[0].data["text/html"]
    assert "Hint 1 of 3" in hinted[0].data["text/plain"]
    assert "you predicted: nothing" in compared[0].data["text/plain"]
    assert kept[0].data["text/plain"] == "(True, False)"


def test_papermill_stops_at_the_first_exercise_with_its_name(tmp_path: Path, quiet: None) -> None:
    nbformat.write(notebook(START, STUB, CHECK, "print('never')"), tmp_path / "in.ipynb")
    with pytest.raises(papermill.PapermillExecutionError, match=r"exercise 4\.1 is not written yet"):
        papermill.execute_notebook(tmp_path / "in.ipynb", tmp_path / "out.ipynb", cwd=tmp_path, progress_bar=False)
    out = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    assert out.cells[-1].execution_count is None
