"""`course build`: labs/NN_topic.ipynb from solutions/NN_topic.py, the same bytes every time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from course_lib.lab.errors import BuildError
from course_lib.lab.notebook import FILE_NAME, INJECTED, as_text, learner_notebook, read_solution

__all__ = ["BuildError", "build_labs", "find_root"]


def build_labs(
    numbers: Sequence[str] = (),
    root: Path | None = None,
    check: bool = False,
    run: bool = False,
    say: Callable[[str], object] = print,
) -> bool:
    """Write the labs with these numbers ("4", "04"; none means all) and say what was done, a line each.

    `check` writes nothing and says which file differs, the executed notebook included. `run` also executes each
    solution with quick parameters and stores `solutions/NN_topic.ipynb` with its outputs. Returns False when
    `check` found a difference, or when a lab has no solution. Raises `BuildError`, naming file and cell, when a
    solution cannot become a lab.
    """
    root = (root or find_root()).resolve()
    up_to_date = True
    for solution in _chosen(root, numbers):
        full = read_solution(solution)
        lab = root / "labs" / solution.with_suffix(".ipynb").name
        text = as_text(learner_notebook(solution, full))
        if check:
            found = {lab: _difference(lab, text)}
            if (stored := solution.with_suffix(".ipynb")).exists():
                found[stored] = _outdated(stored, full)
            for path, difference in found.items():
                say(f"{path.relative_to(root)}: {difference or 'up to date'}")
                up_to_date &= not difference
            continue
        say(f"{lab.relative_to(root)}: {'written' if _write(lab, text) else 'unchanged'}")
        if run:
            _run_and_store(root, solution, full, say)
    if not numbers:
        for stray in _strays(root):
            say(f"{stray.relative_to(root)}: has no solution; remove it, or give it one")
            up_to_date = False
    return up_to_date


def _run_and_store(root: Path, solution: Path, full: NotebookNode, say: Callable[[str], object]) -> None:
    """The executed notebook beside its source, and its tagged pictures as `solutions/pictures/NN_cell.png`."""
    from course_lib.lab.execute import executed, pictures

    stored, notebook = solution.with_suffix(".ipynb"), executed(solution, full)
    _write(stored, as_text(notebook))
    say(f"{stored.relative_to(root)}: run and stored")
    for cell, png in pictures(notebook).items():
        path = root / "solutions" / "pictures" / f"{solution.name[:2]}_{cell}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png)
        say(f"{path.relative_to(root)}: written")


def find_root(start: Path | None = None) -> Path:
    """The nearest folder, here or above, that holds `solutions/`. Raises `BuildError` where there is none."""
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        if (folder / "solutions").is_dir():
            return folder
    raise BuildError(f"there is no solutions/ in {start} or above it: labs are built in a checkout of the course")


def _chosen(root: Path, numbers: Sequence[str]) -> list[Path]:
    """The solution files with these numbers, in order. A misnamed file is an error, or nobody would miss it."""
    by_number: dict[str, Path] = {}
    for path in sorted((root / "solutions").glob("*.py")):
        named = FILE_NAME.match(path.name)
        if named is None:
            raise BuildError(f"solutions/{path.name} is not named NN_topic.py (two digits, lower case)")
        if other := by_number.get(named["number"]):
            raise BuildError(f"solutions/{other.name} and solutions/{path.name} have the same number")
        by_number[named["number"]] = path
    wanted = [number.zfill(2) for number in numbers] or list(by_number)
    if unknown := [number for number in wanted if number not in by_number]:
        known = ", ".join(by_number) or "none"
        raise BuildError(f"there is no solution number {', '.join(unknown)} (there are: {known})")
    return [by_number[number] for number in dict.fromkeys(wanted)]


def _strays(root: Path) -> list[Path]:
    labs = sorted((root / "labs").glob("*.ipynb"))
    return [lab for lab in labs if not (root / "solutions" / lab.with_suffix(".py").name).exists()]


def _difference(lab: Path, text: str) -> str:
    """How the file differs from what it should be, in a few words; empty when it does not."""
    if not lab.exists():
        return "missing"
    if lab.read_bytes() == text.encode():
        return ""
    try:
        there = {cell.get("id"): cell for cell in nbformat.reads(lab.read_text(encoding="utf-8"), as_version=4).cells}
    except Exception:  # nbformat raises many kinds for a file that is not a notebook
        return "differs: it is not a readable notebook"
    wanted = nbformat.reads(text, as_version=4).cells
    for cell in wanted:
        if there.get(cell.id) != cell:
            return f'differs, first in cell "{cell.id}"'
    extra = [identity for identity in there if identity not in {cell.id for cell in wanted}]
    return f'differs: it has a cell "{extra[0]}" that the solution has not' if extra else "differs in order or form"


def _outdated(stored: Path, full: NotebookNode) -> str:
    """Whether the executed notebook ran other code than the solution has now. Its prose is allowed to be older."""
    try:
        cells = nbformat.read(stored, as_version=4).cells
    except Exception:  # nbformat raises many kinds for a file that is not a notebook
        return "it is not a readable notebook"
    there = [(cell.get("id"), cell.source) for cell in cells if cell.cell_type == "code" and cell.get("id") != INJECTED]
    wanted = [(cell.id, cell.source) for cell in full.cells if cell.cell_type == "code"]
    if there == wanted:
        return ""
    changed = [identity for identity, source in wanted if (identity, source) not in there]
    return f'was run with other code, first in cell "{changed[0]}"' if changed else "was run with other cells"


def _write(path: Path, text: str) -> bool:
    """Write the file in one step, unless it is already so. Returns whether it was written."""
    data = text.encode()
    if path.exists() and path.read_bytes() == data:
        return False
    path.parent.mkdir(exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
    return True
