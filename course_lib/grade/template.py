"""What is taken from a submission: the source of its exercise cells. All else comes from the instructor's notebook."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from course_lib.lab.model import Exercise
from course_lib.lab.notebook import learner_notebook, read_solution
from course_lib.lab.registry import of_lab

LARGEST_BYTES = 64 * 2**20


class Unreadable(ValueError):
    """A file that is not a notebook. The message gives line and offset."""


@dataclass(frozen=True)
class Template:
    """The instructor's notebook of a lab as learners get it, and which of its cells are exercises."""

    lab: str
    name: str
    notebook: NotebookNode
    exercises: dict[str, Exercise]

    @classmethod
    def load(cls, lab: str, root: Path) -> Template:
        """From `solutions/NN_*.py`, or where there are no solutions from `labs/NN_*.ipynb`.

        Raises `FileNotFoundError` for a lab that is not there.
        """
        number = lab.zfill(2)
        if sources := sorted((root / "solutions").glob(f"{number}_*.py")):
            notebook = learner_notebook(sources[0], read_solution(sources[0]))
            return cls(number, sources[0].stem, notebook, of_lab(number))
        if notebooks := sorted((root / "labs").glob(f"{number}_*.ipynb")):
            return cls(number, notebooks[0].stem, nbformat.read(notebooks[0], as_version=4), of_lab(number))
        raise FileNotFoundError(f"there is no lab {number} in {root}: neither solutions/ nor labs/ has it")

    def cells(self) -> dict[str, NotebookNode]:
        """The exercise cells by the number of their exercise, in order."""
        return {c.metadata.exercise: c for c in self.notebook.cells if "exercise" in c.metadata}

    def prelude(self, sources: Iterable[str]) -> list[str]:
        """The import statements of the other cells that bind a name which stands in one of the `sources`."""
        found, used = [], set(re.findall(r"\w+", "\n".join(sources)))
        for cell in self.notebook.cells:
            if cell.cell_type != "code" or "exercise" in cell.metadata:
                continue
            for node in ast.parse(cell.source).body:
                if isinstance(node, ast.Import | ast.ImportFrom) and used & {
                    alias.asname or alias.name.partition(".")[0] for alias in node.names
                }:
                    found.append(ast.unparse(node))
        return found


@dataclass(frozen=True)
class Submission:
    """The sources of the exercise cells by exercise number, and remarks on how they were found."""

    sources: dict[str, str]
    flags: tuple[str, ...]


def read_submission(data: bytes, template: Template) -> Submission:
    """Take the exercise cells out of a notebook file. Missing, duplicate and moved cells are flagged.

    Raises `Unreadable` for what is not a notebook.
    """
    cells = [cell for cell in _cells(data) if cell.get("cell_type") == "code"]
    wanted = template.cells()
    sources, flags, places = {}, [], []
    for number, cell in wanted.items():
        stub = cell.source.strip()
        candidates = _candidates(cells, number, cell, template.exercises[number].needs)
        if not candidates:
            flags.append(f"the cell of exercise {number} is missing")
            continue
        texts = [_source(candidate) for candidate in candidates]
        written = [i for i, text in enumerate(texts) if text.strip() != stub] or [0]
        if len(candidates) > 1:
            flags.append(f"there are {len(candidates)} cells of exercise {number}; the first that is written counts")
        sources[number] = texts[written[0]]
        places.append(cells.index(candidates[written[0]]))
    if places != sorted(places):
        flags.append("exercise cells have been moved; they run in the order of the lab")
    return Submission(sources, tuple(flags))


def rebuilt(template: Template, submission: Submission) -> NotebookNode:
    """The template with the submission's source in its exercise cells: tags, tests and kernel are the template's."""
    notebook = nbformat.reads(nbformat.writes(template.notebook, version=4), as_version=4)
    for cell in notebook.cells:
        if (number := cell.metadata.get("exercise")) in submission.sources:
            cell.source = submission.sources[number]
    return notebook


def stub_line(source: str) -> int | None:
    """The line on which a stub's `raise NotImplementedError` was left, if there is one."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if isinstance(raised, ast.Name) and raised.id == "NotImplementedError":
                return node.lineno
    return None


def _cells(data: bytes) -> list[dict]:
    if len(data) > LARGEST_BYTES:
        raise Unreadable(f"the file has {len(data) / 2**20:.0f} MB; more than {LARGEST_BYTES >> 20} MB are not read")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise Unreadable(f"not a notebook: not UTF-8 text at line {line}, offset {error.start}") from None
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise Unreadable(f"not a notebook: {error.msg} at line {error.lineno}, offset {error.pos}") from None
    except (RecursionError, ValueError):
        raise Unreadable("not a notebook: nested too deeply, or with a number too long, at line 1, offset 0") from None
    if isinstance(content, dict) and "worksheets" in content:
        content = _upgraded(text)
    cells = content.get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list):
        raise Unreadable("not a notebook: there is no list of cells in it (line 1, offset 0)")
    return [cell for cell in cells if isinstance(cell, dict)]


def _upgraded(text: str) -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return nbformat.reads(text, as_version=4)
        except Exception as error:  # nbformat raises many kinds
            raise Unreadable(f"an old notebook that nbformat cannot convert ({error}), line 1, offset 0") from None


def _candidates(cells: list[dict], number: str, wanted: NotebookNode, needs: str) -> list[dict]:
    """The cells that can be the one of an exercise: by id, else by the exercise's number, else by what they define."""
    by_id = [cell for cell in cells if cell.get("id") == wanted.id]
    metadata = [(cell, cell.get("metadata")) for cell in cells]
    by_number = [cell for cell, m in metadata if isinstance(m, dict) and m.get("exercise") == number]
    by_name = [cell for cell in cells if _defines(_source(cell), needs)]
    return by_id or by_number or by_name


def _defines(source: str, name: str) -> bool:
    return any(line.startswith((f"def {name}(", f"class {name}(", f"class {name}:")) for line in source.splitlines())


def _source(cell: dict) -> str:
    source = cell.get("source", "")
    if isinstance(source, list):
        source = "".join(part for part in source if isinstance(part, str))
    return source if isinstance(source, str) else ""
