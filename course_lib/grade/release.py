"""`course release`: the tree that learners get, and the proof that nothing hidden is in it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from course_lib.grade.batch import find_root
from course_lib.lab.errors import BuildError
from course_lib.lab.markers import MARKER, RESEMBLING
from course_lib.lab.notebook import FILE_NAME, as_text, learner_notebook, read_solution

TOP = ("README.md", "Makefile", "pyproject.toml", "environment.yml", "labs", "course_lib")
LEFT_OUT = ("__pycache__", "planted", ".ipynb_checkpoints", ".course")
LEAST_LINE = 24
"""A line of a solution shorter than this says too little to be looked for in other files."""


class ReleaseError(Exception):
    """A tree that cannot be released. The message names the file and what is hidden in it."""


def release_tree(folder: Path, root: Path | None = None) -> int:
    """Write the learner's tree to `folder` and return the number of files. Raises `ReleaseError`; then nothing is left.

    Labs are built anew from the solutions, so a stale one cannot slip out.
    """
    try:
        root = root or find_root()
    except FileNotFoundError as error:
        raise ReleaseError(str(error)) from None
    if not (root / "solutions").is_dir():
        raise ReleaseError(f"{root} has no solutions/: a release is made from the instructor's tree")
    if folder.exists() and any(folder.iterdir()):
        raise ReleaseError(f"{folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name in TOP:
            if (root / name).is_dir():
                shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns(*LEFT_OUT, "*.pyc"))
            elif (root / name).exists():
                shutil.copy2(root / name, folder / name)
        _build_labs(root, folder)
        _pictures(root, folder)
        refuse_hidden(folder, hidden_lines(root))
    except (BuildError, ReleaseError) as error:
        shutil.rmtree(folder)
        raise ReleaseError(str(error)) from None
    return sum(path.is_file() for path in folder.rglob("*"))


def hidden_lines(root: Path) -> set[str]:
    """The telling lines of solutions, hidden tests and planted answers: none may be in a learner's tree."""
    found: set[str] = set()
    for path in sorted((root / "solutions").glob("*.py")):
        inside = False
        for line in path.read_text(encoding="utf-8").splitlines():
            marker = MARKER.match(line)
            if marker:
                inside = marker["edge"] == "BEGIN"
            elif inside:
                found.add(_bare(line))
    for path in sorted((root / "solutions" / "checks").rglob("*.py")):
        found |= {_bare(line) for line in path.read_text(encoding="utf-8").splitlines()}
    return {line for line in found if len(line) >= LEAST_LINE}


def refuse_hidden(folder: Path, hidden: set[str]) -> None:
    """Raises `ReleaseError` for a marker or a hidden line in the tree, and for folders that must not be there.

    The library may hold a line that a solution happens to share; labs may hold none.
    """
    for path in sorted(folder.rglob("*")):
        where = path.relative_to(folder)
        if path.is_dir() and path.name in ("solutions", "planted", "checks"):
            raise ReleaseError(f"{where}/ must not be in a learner's tree")
        if not path.is_file() or path.suffix not in (".ipynb", ".md", ".html", ".json"):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        lines = [_bare(re.sub(r'^\s*"|(\\n)?",?$', "", line).replace('\\"', '"')) for line in text.splitlines()]
        for number, line in enumerate(lines, start=1):
            if path.suffix == ".ipynb" and RESEMBLING.search(line):
                raise ReleaseError(f"{where}, line {number}, has a solution marker")
            if line in hidden:
                raise ReleaseError(f"{where}, line {number}, is a line of a solution: {line}")


def _build_labs(root: Path, folder: Path) -> None:
    for path in sorted((root / "solutions").glob("*.py")):
        if FILE_NAME.match(path.name):
            text = as_text(learner_notebook(path, read_solution(path)))
            (folder / "labs" / path.with_suffix(".ipynb").name).write_bytes(text.encode())


def _pictures(root: Path, folder: Path) -> None:
    """The README shows pictures of solutions: it gets them in a folder of its own, and they show no code."""
    readme = folder / "README.md"
    if not readme.exists():
        return
    text = readme.read_text(encoding="utf-8")
    for name in sorted(set(re.findall(r"solutions/pictures/([\w.-]+)", text))):
        if (root / "solutions" / "pictures" / name).exists():
            (folder / "labs" / "pictures").mkdir(exist_ok=True)
            shutil.copy2(root / "solutions" / "pictures" / name, folder / "labs" / "pictures" / name)
    readme.write_text(text.replace("solutions/pictures/", "labs/pictures/"), encoding="utf-8")


def _bare(line: str) -> str:
    """A line without indentation and comment."""
    return line.partition("  #")[0].strip()
