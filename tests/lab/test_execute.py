"""`course build --run`: a solution with its outputs, and the cell's name when it does not run through."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from course_lib.lab.build import BuildError, build_labs

TEXT = """# %% id="parameters" tags=["parameters"]
ranks, fabric, device, seed, submission = 2, "paced", "auto", 0, ""
ranks = 2
fabric = "paced"
device = "auto"
seed = 0
quick = False
submission = ""

# %% id="show" exercise="4.1"
import os
### BEGIN SOLUTION
print(quick, os.getcwd(), "{root}")
### END SOLUTION

# %% id="last"
{last}
"""


def run(root: Path, last: str) -> nbformat.NotebookNode:
    (root / "solutions").mkdir(exist_ok=True)
    (root / "solutions/04_try.py").write_text(TEXT.format(last=last, root=root.resolve()))
    build_labs(root=root, run=True, say=lambda line: None)
    return nbformat.read(root / "solutions/04_try.ipynb", as_version=4)


def test_outputs_are_stored_without_times_paths_or_versions(tmp_path: Path) -> None:
    notebook = run(tmp_path, "pass")
    nbformat.validate(notebook)
    assert [cell.id for cell in notebook.cells] == ["parameters", "injected-parameters", "show", "last"]
    assert notebook.cells[2].outputs[0].text == "True . .\n"
    assert "### BEGIN SOLUTION" in notebook.cells[2].source
    metadata = [notebook.metadata, *(cell.metadata for cell in notebook.cells)]
    assert not any(word in str(metadata) for word in ("papermill", "version", "execution"))
    first = (tmp_path / "solutions/04_try.ipynb").read_bytes()
    run(tmp_path, "pass")
    assert (tmp_path / "solutions/04_try.ipynb").read_bytes() == first


@pytest.mark.parametrize(
    ("last", "says"),
    [
        ("1 / 0", '04_try.py: cell "last" failed: ZeroDivisionError'),
        ("import sys; sys.exit(0)", '04_try.py: cell "last" failed: SystemExit'),
        ("import os; os._exit(0)", '04_try.py: cell "last" was the last to run: its code ended the kernel'),
    ],
)
def test_a_failure_names_the_cell_and_stores_nothing(tmp_path: Path, last: str, says: str) -> None:
    with pytest.raises(BuildError, match=says):
        run(tmp_path, last)
    assert not (tmp_path / "solutions/04_try.ipynb").exists()


def test_tagged_pictures_are_stored_beside_the_notebook(tmp_path: Path) -> None:
    text = TEXT.replace('id="last"', 'id="last" tags=["picture"]')
    (tmp_path / "solutions").mkdir()
    draw = "from matplotlib.figure import Figure\nfrom IPython.display import Image\nimport io\n" \
           "b = io.BytesIO(); Figure().savefig(b); Image(b.getvalue())"
    (tmp_path / "solutions/04_try.py").write_text(text.format(last=draw, root=tmp_path.resolve()))
    build_labs(root=tmp_path, run=True, say=lambda line: None)
    assert (tmp_path / "solutions/pictures/04_last.png").read_bytes().startswith(b"\x89PNG")


def test_a_cell_tagged_picture_without_one_is_named(tmp_path: Path) -> None:
    text = TEXT.replace('id="last"', 'id="last" tags=["picture"]')
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions/04_try.py").write_text(text.format(last="1 + 1", root=tmp_path.resolve()))
    with pytest.raises(BuildError, match='cell "last" is tagged picture and shows none'):
        build_labs(root=tmp_path, run=True, say=lambda line: None)
