"""Running a solution through papermill, and keeping of the result only what readers of it need."""

from __future__ import annotations

import base64
import os
import tempfile
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from course_lib.lab.errors import BuildError
from course_lib.lab.notebook import INJECTED, NOTEBOOK_METADATA

SECONDS_PER_CELL = 600


def executed(solution: Path, full: NotebookNode, parameters: dict | None = None) -> NotebookNode:
    """The full notebook with outputs, run in a folder of its own. `parameters` default to `quick=True`.

    Raises `BuildError` naming the cell that failed, or the last that ran: a kernel that leaves early
    looks like success to papermill.
    """
    from nbclient.exceptions import DeadKernelError
    from papermill import execute_notebook
    from papermill.exceptions import PapermillExecutionError

    with tempfile.TemporaryDirectory(prefix="course-build-") as folder:
        source, result = Path(folder, solution.stem + ".ipynb"), Path(folder, "out.ipynb")
        nbformat.write(full, source)
        try:
            execute_notebook(
                str(source), str(result), parameters=parameters or {"quick": True}, kernel_name="python3", cwd=folder,
                progress_bar=False, log_output=False, execution_timeout=SECONDS_PER_CELL,
            )  # fmt: skip
            failure = ""
        except PapermillExecutionError as error:
            failure = f"{error.ename}: {error.evalue}"
        except DeadKernelError:
            failure = "its code ended the kernel"
        notebook = nbformat.read(result, as_version=4)
    _require_a_full_run(solution, notebook, failure)
    _tidy(notebook, {folder: ".", str(solution.resolve().parents[1]): ".", str(Path.home()): "~"})
    return notebook


def pictures(notebook: NotebookNode) -> dict[str, bytes]:
    """The PNG of every cell tagged `picture`, by cell id: what README and reports show of a real run.

    Raises `BuildError` for a tagged cell that shows none.
    """
    found = {}
    for cell in notebook.cells:
        if "picture" not in cell.metadata.get("tags", []):
            continue
        shown = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
        if not shown:
            raise BuildError(f'cell "{cell.id}" is tagged picture and shows none')
        found[cell.id] = base64.b64decode(shown[-1])
    return found


def _require_a_full_run(solution: Path, notebook: NotebookNode, failure: str) -> None:
    """Papermill notes when each cell began; `sys.exit(0)` and a dead kernel look like success otherwise."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    for cell in code:
        for output in cell.outputs:
            if output.output_type == "error" and "raises-exception" not in cell.metadata.get("tags", []):
                raise BuildError(f'{solution.name}: cell "{cell.id}" failed: {output.ename}: {output.evalue}')
    begun = [cell for cell in code if cell.metadata.get("papermill", {}).get("start_time")]
    if failure or len(begun) < len(code):
        last = begun[-1].id if begun else "none"
        raise BuildError(f'{solution.name}: cell "{last}" was the last to run: {failure or "it left early"}')


def _tidy(notebook: NotebookNode, names: dict[str, str]) -> None:
    """Take out times, versions and the paths of this machine; give papermill's own cell a lasting id."""
    widgets = notebook.metadata.get("widgets")
    notebook.metadata = nbformat.from_dict(NOTEBOOK_METADATA | ({"widgets": widgets} if widgets else {}))
    cells = []
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if "papermill-error-cell-tag" in tags:
            continue
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
        if "injected-parameters" in tags:
            cell.id = INJECTED
        if not tags:
            cell.metadata.pop("tags", None)
        if cell.cell_type == "code":
            cell.outputs = [nbformat.from_dict(_renamed(output, names)) for output in cell.outputs]
        cells.append(cell)
    notebook.cells = cells


def _renamed(value: object, names: dict[str, str]) -> object:
    """`value` with each path in `names` replaced, in all strings at any depth."""
    if isinstance(value, dict):
        return {key: _renamed(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item, names) for item in value]
    if isinstance(value, str):
        for path, name in names.items():
            if len(path) > len(os.sep):
                value = value.replace(path, name)
    return value
