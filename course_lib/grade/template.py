"""What is taken from a submission: the source of its exercise cells. All else comes from the instructor's notebook."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
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
    """The instructor's notebook of a lab as learners get it, and which of its cells are exercises. `solution` has the
    sources of these cells as the instructor wrote them, where there are solutions."""

    lab: str
    name: str
    notebook: NotebookNode
    exercises: dict[str, Exercise]
    solution: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, lab: str, root: Path) -> Template:
        """From `solutions/NN_*.py`, or where there are no solutions from `labs/NN_*.ipynb`.

        Raises `FileNotFoundError` for a lab that is not there.
        """
        number = lab.zfill(2)
        if sources := sorted((root / "solutions").glob(f"{number}_*.py")):
            full = read_solution(sources[0])
            solution = {c.metadata.exercise: c.source for c in full.cells if "exercise" in c.metadata}
            return cls(number, sources[0].stem, learner_notebook(sources[0], full), of_lab(number), solution)
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
    """Take the exercise cells out of a notebook file. Missing, duplicate and moved cells are flagged, and so are cells
    that are no part of the lab: they are not run.

    Raises `Unreadable` for what is not a notebook.
    """
    cells = [cell for cell in _cells(data) if cell.get("cell_type") == "code"]
    wanted = template.cells()
    sources, flags, places = {}, [], []
    for number, cell in wanted.items():
        stub = cell.source.strip()
        groups = _candidates(cells, number, cell, template)
        if not groups:
            flags.append(f"the cell of exercise {number} is missing")
            continue
        written = [(group, each) for group in groups for each in group if _text(each) not in ("", stub)]
        candidates, chosen = written[0] if written else (groups[0], groups[0][0])
        if candidates is not groups[0]:
            flags.append(f"the cell of exercise {number} is not written; one that defines the same was taken instead")
        elif len(candidates) > 1:
            flags.append(f"there are {len(candidates)} cells of exercise {number}; the first that is written counts")
        sources[number] = _source(chosen)
        places.append(cells.index(chosen))
    if places != sorted(places):
        flags.append("exercise cells have been moved; they run in the order of the lab")
    known = {_text(cell) for cell in template.notebook.cells} | {text.strip() for text in sources.values()} | {""}
    if own := [cell for cell in cells if _text(cell) not in known and not _is_of(cell, template)]:
        flags.append(f"{len(own)} cells of your own are not run; what an exercise needs belongs into its cell")
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
    if data.startswith(b"PK\x03\x04"):
        raise Unreadable("not a notebook but a zip archive, or a document that is one inside: line 1, offset 0")
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


def _candidates(cells: list[dict], number: str, wanted: NotebookNode, template: Template) -> list[list[dict]]:
    """The cells that can be the one of an exercise: those with its id, those with the exercise's number, and those that
    define what it needs and are no other cell of the lab. Groups without a cell are left out."""
    needs = template.exercises[number].needs
    others = {_text(cell) for cell in template.notebook.cells} - {_text(wanted)}
    by_id = [cell for cell in cells if cell.get("id") == wanted.id]
    metadata = [(cell, cell.get("metadata")) for cell in cells]
    by_number = [cell for cell, m in metadata if isinstance(m, dict) and m.get("exercise") == number]
    by_name = [cell for cell in cells if _defines(_source(cell), needs) and _text(cell) not in others
               and not _is_of(cell, template, but=wanted.id)]  # fmt: skip
    return [group for group in (by_id, by_number, by_name) if group]


def _is_of(cell: dict, template: Template, but: str = "") -> bool:
    """Whether a cell has the id of one of the lab's cells."""
    return cell.get("id") in [each.id for each in template.notebook.cells if each.id != but]


def _defines(source: str, name: str) -> bool:
    return any(line.startswith((f"def {name}(", f"class {name}(", f"class {name}:")) for line in source.splitlines())


def _text(cell: dict) -> str:
    return _source(cell).strip()


def _source(cell: dict) -> str:
    source = cell.get("source", "")
    if isinstance(source, list):
        source = "".join(part for part in source if isinstance(part, str))
    return source if isinstance(source, str) else ""
