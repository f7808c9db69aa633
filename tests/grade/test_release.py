"""The learner's tree holds what learners need and nothing that is hidden from them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.grade.release import ReleaseError, hidden_lines, refuse_hidden, release_tree

ROOT = Path(__file__).resolve().parents[2]


def test_the_tree_is_whole_and_shows_no_solution(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    assert release_tree(tree, ROOT) == sum(path.is_file() for path in tree.rglob("*"))
    assert {path.name for path in tree.iterdir()} >= {"README.md", "labs", "course_lib", "pyproject.toml", "Makefile"}
    assert not [path for path in tree.rglob("*") if path.name in ("solutions", "planted", "tests", "__pycache__")]
    labs = "\n".join(path.read_text() for path in (tree / "labs").glob("*.ipynb"))
    assert labs
    assert not [line for line in hidden_lines(ROOT) if f'{line}\\n"' in labs]
    done = subprocess.run([sys.executable, "-m", "course_lib.cli", "--help"], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0


def test_a_hidden_line_in_a_lab_is_refused(tmp_path: Path) -> None:
    line = sorted(hidden_lines(ROOT), key=len)[-1]
    (tmp_path / "lab.md").write_text(f"see\n    {line}\n")
    with pytest.raises(ReleaseError, match="line 2, is a line of a solution"):
        refuse_hidden(tmp_path, hidden_lines(ROOT))


def test_folders_that_learners_must_not_see_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x" / "planted").mkdir(parents=True)
    with pytest.raises(ReleaseError, match="planted"):
        refuse_hidden(tmp_path, set())


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(ReleaseError, match="not empty"):
        release_tree(tmp_path, ROOT)
    assert (tmp_path / "mine").exists()
