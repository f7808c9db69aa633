"""One solution, two notebooks: `solutions/NN_topic.py` read as the full one, and what learners get of it.

The source is jupytext's percent format. A cell's header carries its id, and an exercise's number:

    # %% [markdown] id="goal"
    # %% id="parameters" tags=["parameters"]
    # %% id="assign" exercise="4.1"
"""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

from course_lib.lab.errors import BuildError
from course_lib.lab.markers import MarkerError, cut, has_marker

PARAMETERS = ("ranks", "fabric", "device", "seed", "quick", "submission")
FILE_NAME = re.compile(r"^(?P<number>\d{2})_[a-z0-9_]+\.py$")
CELL_ID = re.compile(r"^[A-Za-z0-9_-]{1,64}$")
HEADER_KEYS = {"tags", "exercise", "jupyter"}
JUPYTEXT_KEYS = {"lines_to_next_cell", "lines_to_end_of_cell_marker"}
INJECTED = "injected-parameters"
"""The lasting id of the cell that papermill adds."""
NOTEBOOK_METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def read_solution(path: Path) -> NotebookNode:
    """The full notebook of `path`: ids and tags in place, nothing cut, no outputs.

    Raises `BuildError` for a cell without an id, with an id twice or an illegal one, with an unknown
    header key or code that does not compile, for an exercise without a solution, and for a notebook
    without its cell of parameters.
    """
    text = path.read_text(encoding="utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    found = jupytext.reads(text, fmt="py:percent")
    cells = [_cell(path, index, cell) for index, cell in enumerate(found.cells, start=1)]
    _refuse_duplicates(path, cells)
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=NOTEBOOK_METADATA)
    learner_notebook(path, notebook)
    _require_parameters(path, cells)
    nbformat.validate(notebook)
    return notebook


def learner_notebook(path: Path, full: NotebookNode) -> NotebookNode:
    """What learners get of `full`: solutions replaced by stubs, hidden tests gone, cells left empty gone."""
    cells = []
    for cell in full.cells:
        source = _learner_source(path, cell)
        if source or not cell.source.strip():
            cells.append(_same_but(cell, source))
    return nbformat.v4.new_notebook(cells=cells, metadata=NOTEBOOK_METADATA)


def as_text(notebook: NotebookNode) -> str:
    """The notebook as a file's text: keys sorted, one final newline, the same bytes on every machine."""
    return nbformat.writes(notebook, version=4).rstrip("\n") + "\n"


def _cell(path: Path, index: int, read: NotebookNode) -> NotebookNode:
    """The cell that jupytext read, with its id moved to where notebooks keep it."""
    metadata = {k: v for k, v in read.metadata.items() if k not in JUPYTEXT_KEYS}
    identity = metadata.pop("id", None)
    where = f"{path.name}: cell {index} ({_first_words(read.source)})"
    if identity is None:
        raise BuildError(f'{where} has no id: give its header one, as in `# %% id="sweep"`')
    if not isinstance(identity, str) or not CELL_ID.match(identity):
        raise BuildError(f"{where}: the id {identity!r} may hold letters, digits, - and _ only, at most 64")
    if unknown := set(metadata) - HEADER_KEYS:
        names, known = (", ".join(sorted(keys)) for keys in (unknown, HEADER_KEYS | {"id"}))
        raise BuildError(f"{_at(path, identity)} has an unknown header key: {names} (known: {known})")
    if read.cell_type == "raw":
        raise BuildError(f"{_at(path, identity)} is a raw cell; use code or [markdown]")
    if "exercise" in metadata:
        metadata = _exercise_metadata(path, identity, metadata)
    elif "exercise" in metadata.get("tags", []):
        raise BuildError(f'{_at(path, identity)} is tagged exercise: name it in the header, as in exercise="4.1"')
    new = nbformat.v4.new_code_cell if read.cell_type == "code" else nbformat.v4.new_markdown_cell
    return new(source=read.source, id=identity, metadata=metadata)


def _exercise_metadata(path: Path, identity: str, metadata: dict) -> dict:
    """The metadata of an exercise's cell: tagged, and not to be deleted by accident."""
    number, exercise = FILE_NAME.match(path.name), metadata["exercise"]
    chapter = int(number["number"]) if number else None
    if not isinstance(exercise, str) or not re.fullmatch(rf"{chapter}\.\d+", exercise):
        raise BuildError(f'{_at(path, identity)}: exercise={exercise!r} should be a string like "{chapter}.1"')
    tags = metadata.get("tags", [])
    return metadata | {"tags": tags if "exercise" in tags else [*tags, "exercise"], "deletable": False}


def _learner_source(path: Path, cell: NotebookNode) -> str:
    """The cell's source without what is marked. Both what was and what is left must compile."""
    if cell.cell_type != "code":
        if has_marker(cell.source):
            raise BuildError(f"{_at(path, cell.id)} is text with a solution marker in it; only code cells are cut")
        return cell.source
    exercise = cell.metadata.get("exercise")
    try:
        kept = cut(cell.source, exercise)
    except MarkerError as error:
        raise BuildError(f"{_at(path, cell.id)}: {error}") from None
    if exercise and not kept.solutions:
        raise BuildError(f"{_at(path, cell.id)} is exercise {exercise} but has no ### BEGIN SOLUTION")
    for source, what in ((cell.source, "is not valid Python"), (kept.source, "is not valid Python once cut")):
        _compile(path, cell.id, source, what)
    return kept.source


def _compile(path: Path, identity: str, source: str, what: str) -> None:
    """Refuse code that a kernel would refuse; magics and a top-level `await` are fine."""
    if source.startswith("%%"):
        return
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = TransformerManager().transform_cell(source)
            compile(code, identity, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        raise BuildError(f"{_at(path, identity)} {what}: {error.msg}, line {error.lineno}") from None


def _refuse_duplicates(path: Path, cells: list[NotebookNode]) -> None:
    for what, values in (
        ("id", [c.id for c in cells]),
        ("exercise", [c.metadata.exercise for c in cells if "exercise" in c.metadata]),
    ):
        for value in values:
            if values.count(value) > 1:
                raise BuildError(f'{path.name}: {what}="{value}" is used by {values.count(value)} cells')


def _require_parameters(path: Path, cells: list[NotebookNode]) -> None:
    tagged = [c for c in cells if "parameters" in c.metadata.get("tags", []) and c.cell_type == "code"]
    if len(tagged) != 1:
        raise BuildError(f'{path.name}: {len(tagged)} code cells are tagged "parameters"; a lab has exactly one')
    names = {
        target.id
        for node in ast.parse(tagged[0].source).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    if missing := [name for name in PARAMETERS if name not in names]:
        raise BuildError(f"{_at(path, tagged[0].id)} lacks the parameters: {', '.join(missing)}")


def _same_but(cell: NotebookNode, source: str) -> NotebookNode:
    copy = NotebookNode(cell)
    copy.source = source
    return copy


def _at(path: Path, identity: str) -> str:
    return f'{path.name}: cell "{identity}"'


def _first_words(source: str) -> str:
    line = next((line for line in source.splitlines() if line.strip()), "empty")
    return line if len(line) <= 40 else line[:39] + "…"
