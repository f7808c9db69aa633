"""`course build`: from a solution to a lab, and one clear sentence for everything that cannot become one."""

from __future__ import annotations

from pathlib import Path

import jupytext
import nbformat
import pytest
from typer.testing import CliRunner

from course_lib.cli import app
from course_lib.lab.build import BuildError, build_labs, find_root
from course_lib.lab.notebook import read_solution

GOAL = '# %% [markdown] id="goal"\n# # Buckets\n# β is per byte.\n'
PARAMETERS = (
    '# %% id="parameters" tags=["parameters"]\n'
    'ranks = 2\nfabric = "paced"\ndevice: str = "auto"\nseed = 0\nquick = False\nsubmission = ""\n'
)
EXERCISE = (
    '# %% id="assign" exercise="4.1"\ndef assign(x):\n    ### BEGIN SOLUTION\n    return x\n    ### END SOLUTION\n'
)
CHECK = (
    '# %% id="check"\n# %matplotlib inline\nprint(assign(3), quick)\n'
    "### BEGIN HIDDEN TESTS\nassert assign(4) == 4\n### END HIDDEN TESTS\n"
)
HIDDEN = '# %% id="only-hidden"\n### BEGIN HIDDEN TESTS\nassert assign(5) == 5\n### END HIDDEN TESTS\n'
WHOLE = "\n".join([GOAL, PARAMETERS, EXERCISE, CHECK, HIDDEN])


def course(tmp_path: Path, text: str, name: str = "04_try.py") -> Path:
    (tmp_path / "solutions").mkdir(exist_ok=True)
    (tmp_path / "solutions" / name).write_bytes(text.encode())
    return tmp_path


def built(root: Path) -> bytes:
    build_labs(root=root, say=lambda line: None)
    return (root / "labs/04_try.ipynb").read_bytes()


def test_the_lab_holds_stubs_and_no_hidden_string(tmp_path: Path) -> None:
    text = built(course(tmp_path, WHOLE)).decode()
    lab = nbformat.reads(text, as_version=4)
    nbformat.validate(lab)
    assert [cell.id for cell in lab.cells] == ["goal", "parameters", "assign", "check"]
    assert lab.cells[2].source == 'def assign(x):\n    raise NotImplementedError("exercise 4.1")'
    assert lab.cells[2].metadata == {"exercise": "4.1", "tags": ["exercise"], "deletable": False}
    assert lab.cells[3].source == "%matplotlib inline\nprint(assign(3), quick)"
    assert all(cell.outputs == [] and cell.execution_count is None for cell in lab.cells if cell.cell_type == "code")
    assert lab.metadata.kernelspec.name == "python3"
    assert not any(word in text for word in ("return x", "assign(4)", "assign(5)", "HIDDEN", "BEGIN"))


def test_the_same_bytes_every_time_and_for_every_line_ending(tmp_path: Path) -> None:
    first = built(course(tmp_path / "", WHOLE))
    assert first.endswith(b"}\n") and b"\r" not in first and "β".encode() in first
    for variant in (WHOLE, WHOLE.replace("\n", "\r\n"), "\ufeff" + WHOLE):
        assert built(course(tmp_path, variant)) == first


def test_ids_and_tags_survive_the_way_there_and_back(tmp_path: Path) -> None:
    assert jupytext.writes(jupytext.reads(WHOLE, fmt="py:percent"), fmt="py:percent").strip() == WHOLE.strip()


def test_an_unchanged_lab_is_not_written_again(tmp_path: Path) -> None:
    built(course(tmp_path, WHOLE))
    lines: list[str] = []
    before = (tmp_path / "labs/04_try.ipynb").stat().st_mtime_ns
    build_labs(["4"], root=tmp_path, say=lines.append)
    assert lines == ["labs/04_try.ipynb: unchanged"]
    assert (tmp_path / "labs/04_try.ipynb").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (WHOLE.replace('id="check"', 'id="goal"'), '04_try.py: id="goal" is used by 2 cells'),
        (WHOLE.replace(' id="goal"', ""), "04_try.py: cell 1 (# Buckets) has no id"),
        ("import os\n" + WHOLE, "04_try.py: cell 1 (import os) has no id"),
        (WHOLE.replace('"goal"', '"go al"'), "the id 'go al' may hold letters"),
        (WHOLE.replace('"goal"', '"goal" colour="red"'), 'cell "goal" has an unknown header key: colour'),
        (WHOLE.replace('exercise="4.1"', 'exercise="5.1"'), "exercise='5.1' should be a string like \"4.1\""),
        (WHOLE.replace('exercise="4.1"', "exercise=4.1"), 'exercise=4.1 should be a string like "4.1"'),
        (WHOLE.replace(' exercise="4.1"', ""), 'cell "assign": line 2 begins a solution, but the cell header has no'),
        (WHOLE.replace('exercise="4.1"', 'tags=["exercise"]'), 'cell "assign" is tagged exercise: name it'),
        (WHOLE + EXERCISE.replace('"assign"', '"again"'), '04_try.py: exercise="4.1" is used by 2 cells'),
        (WHOLE.replace('id="check"', 'id="check" exercise="4.2"'), 'cell "check" is exercise 4.2 but has no ### BEGIN'),
        (WHOLE.replace("    ### END SOLUTION\n", ""), 'cell "assign": the SOLUTION begun on line 2 is never ended'),
        (WHOLE.replace("# β", "# ### BEGIN SOLUTION"), 'cell "goal" is text with a solution marker in it'),
        (WHOLE.replace("return x", "return x)"), 'cell "assign" is not valid Python: '),
        (WHOLE.replace("def assign(x):\n", "def assign(x):\n    y = (\n"), 'cell "assign" is not valid Python'),
        (WHOLE.replace("seed = 0\n", "").replace("quick", "qick"), 'cell "parameters" lacks the parameters: seed, qu'),
        (WHOLE.replace(' tags=["parameters"]', ""), '0 code cells are tagged "parameters"; a lab has exactly one'),
        (WHOLE + PARAMETERS.replace('id="parameters"', 'id="p2"'), '2 code cells are tagged "parameters"'),
        (WHOLE.replace("[markdown]", "[raw]"), 'cell "goal" is a raw cell'),
    ],
)
def test_what_cannot_become_a_lab_is_told_with_file_and_cell(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BuildError) as error:
        build_labs(root=course(tmp_path, text))
    assert says in str(error.value) and "04_try.py" in str(error.value)
    assert not (tmp_path / "labs").exists()


def test_a_cut_that_leaves_no_valid_code_is_refused(tmp_path: Path) -> None:
    text = EXERCISE.replace("    ### BEGIN", "    if x:\n    ### BEGIN").replace("    return x", "        return x")
    with pytest.raises(BuildError, match="not valid Python once cut"):
        build_labs(root=course(tmp_path, PARAMETERS + text))


def test_magics_cells_and_top_level_await_are_code(tmp_path: Path) -> None:
    extra = '\n# %% id="magic"\n# %%time\n# x = 1\n\n# %% id="wait"\nimport asyncio\n\nawait asyncio.sleep(0)\n'
    read_solution(course(tmp_path, WHOLE + extra) / "solutions/04_try.py")


@pytest.mark.parametrize(
    ("name", "says"),
    [("try.py", "is not named NN_topic.py"), ("04_other.py", "have the same number")],
)
def test_misnamed_files_are_not_passed_over(tmp_path: Path, name: str, says: str) -> None:
    course(tmp_path, WHOLE, name)
    with pytest.raises(BuildError, match=says):
        build_labs(root=course(tmp_path, WHOLE))


def run(root: Path, *arguments: str):
    return CliRunner().invoke(app, ["build", "--root", str(root), *arguments])


def test_check_says_which_file_differs_and_where(tmp_path: Path) -> None:
    course(tmp_path, WHOLE)
    missing = run(tmp_path, "--check")
    assert missing.exit_code == 1 and "labs/04_try.ipynb: missing" in missing.output
    assert run(tmp_path).exit_code == 0
    assert run(tmp_path, "--check", "04").output == "labs/04_try.ipynb: up to date\n"
    lab = tmp_path / "labs/04_try.ipynb"
    lab.write_text(lab.read_text().replace("print(", "print(1, "))
    edited = run(tmp_path, "--check")
    assert edited.exit_code == 1 and 'differs, first in cell "check"' in edited.output
    assert "print(1, " in lab.read_text(), "--check writes nothing"
    lab.write_text("no notebook")
    assert "not a readable notebook" in run(tmp_path, "--check").output


def test_check_points_out_an_executed_solution_that_ran_other_code(tmp_path: Path) -> None:
    built(course(tmp_path, WHOLE))
    full = read_solution(tmp_path / "solutions/04_try.py")
    full.cells.insert(2, nbformat.v4.new_code_cell("quick = True", id="injected-parameters"))
    nbformat.write(full, tmp_path / "solutions/04_try.ipynb")
    assert run(tmp_path, "--check").exit_code == 0
    for changed, where in ((WHOLE.replace("print(assign(3)", "print(assign(5)"), 'first in cell "check"'),
                           (WHOLE.replace(HIDDEN, ""), "other cells")):
        course(tmp_path, changed)
        build_labs(root=tmp_path, say=lambda line: None)
        done = run(tmp_path, "--check")
        assert done.exit_code == 1 and where in done.output
        assert "labs/04_try.ipynb: up to date" in done.output


def test_a_lab_without_solution_is_pointed_out(tmp_path: Path) -> None:
    built(course(tmp_path, WHOLE))
    (tmp_path / "labs/05_gone.ipynb").write_text("{}")
    done = run(tmp_path, "--check")
    assert done.exit_code == 1 and "labs/05_gone.ipynb: has no solution" in done.output


def test_unknown_numbers_list_the_known(tmp_path: Path) -> None:
    done = run(course(tmp_path, WHOLE), "7", "04")
    assert done.exit_code == 1 and "no solution number 07 (there are: 04)" in done.output


def test_check_and_run_exclude_each_other(tmp_path: Path) -> None:
    assert run(course(tmp_path, WHOLE), "--check", "--run").exit_code == 2


def test_outside_a_checkout_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no solutions/ in"):
        find_root(tmp_path)


def test_this_repository_is_up_to_date() -> None:
    lines: list[str] = []
    root = Path(__file__).resolve().parents[2]
    assert build_labs(root=root, check=True, say=lines.append), "\n".join(lines)
    for lab in (root / "labs").glob("*.ipynb"):
        assert not any(marker in lab.read_text() for marker in ("### BEGIN", "### END", "HIDDEN TESTS"))
