"""Only the source of exercise cells is taken; whatever else a file holds is flagged or refused, never fatal."""

from __future__ import annotations

import json
from collections.abc import Callable

import nbformat
import pytest

from course_lib.grade.template import Template, Unreadable, read_submission, rebuilt, stub_line


def test_a_solved_notebook_gives_its_exercise_cells(
    template: Template, notebook: Callable[..., str], sources: dict[str, str]
) -> None:
    found = read_submission(notebook().encode(), template)
    assert found.sources == sources
    assert found.flags == ()


def test_a_byte_order_mark_is_no_fault(template: Template, notebook: Callable[..., str], sources) -> None:
    assert read_submission(b"\xef\xbb\xbf" + notebook().encode(), template).sources == sources


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"hello\nworld", "line 1, offset 0"),
        (b'{"cells": [\n{"a": }]}', "line 2, offset 18"),
        (b"\xff\xfe\x00", "line 1, offset 0"),
        (b"", "line 1, offset 0"),
        (b"PK\x03\x04...", "zip archive"),
        (b"[]", "no list of cells"),
        (b'{"cells": 3}', "no list of cells"),
        (b"[" * 100_000, "line 1"),
        (b'{"cells": [], "worksheets": []}', ""),
    ],
)
def test_what_is_no_notebook_is_refused_with_its_place(template: Template, data: bytes, said: str) -> None:
    if not said:
        assert read_submission(data, template).sources == {}
        return
    with pytest.raises(Unreadable, match=said):
        read_submission(data, template)


def test_cells_without_ids_are_found_by_their_exercise(template: Template, notebook, sources) -> None:
    content = json.loads(notebook())
    for cell in content["cells"]:
        cell.pop("id", None)
    assert read_submission(json.dumps(content).encode(), template).sources == sources


def test_cells_without_ids_and_metadata_are_found_by_what_they_define(template: Template, notebook, sources) -> None:
    content = json.loads(notebook())
    for cell in content["cells"]:
        cell.pop("id", None)
        cell["metadata"] = {}
    assert read_submission(json.dumps(content).encode(), template).sources == sources


def test_missing_moved_and_duplicate_cells_are_flagged(template: Template, notebook, sources) -> None:
    content = json.loads(notebook())
    cells = {cell["id"]: cell for cell in content["cells"]}
    ids = {number: cell.id for number, cell in template.cells().items()}
    stub = {**cells[ids["4.1"]], "source": template.cells()["4.1"].source}
    content["cells"] = [cells[ids["4.2"]], stub, cells[ids["4.1"]]]
    found = read_submission(json.dumps(content).encode(), template)
    assert found.sources == {number: sources[number] for number in ("4.1", "4.2")}
    assert any("4.3 is missing" in flag for flag in found.flags)
    assert any("2 cells of exercise 4.1" in flag for flag in found.flags)
    assert any("moved" in flag for flag in found.flags)


def test_an_answer_below_its_stub_counts_and_cells_of_ones_own_are_told(template: Template, notebook, sources) -> None:
    content = json.loads(notebook({"4.1": template.cells()["4.1"].source}))
    own = {"cell_type": "code", "id": "mine", "metadata": {}, "outputs": [], "execution_count": None}
    content["cells"] += [own | {"source": sources["4.1"]}, own | {"source": "def helper(): pass"}, own | {"source": ""}]
    found = read_submission(json.dumps(content).encode(), template)
    assert found.sources == sources
    assert any("4.1 is not written; one that defines the same" in flag for flag in found.flags)
    assert any(flag.startswith("1 cells of your own are not run") for flag in found.flags)


def test_a_stub_stays_one_though_the_lab_has_other_cells(template: Template, notebook) -> None:
    content = json.loads(notebook({number: cell.source for number, cell in template.cells().items()}))
    found = read_submission(json.dumps(content).encode(), template)
    assert found.sources == {number: cell.source for number, cell in template.cells().items()}
    assert found.flags == ()


def test_tags_tests_and_kernel_are_the_templates(template: Template, notebook: Callable[..., str]) -> None:
    """The usual graders give full marks for `skip-execution` on the test cell."""
    check = next(cell.id for cell in template.notebook.cells if cell.id.endswith("-check"))
    text = notebook(tags={check: ["skip-execution"]}).replace('"python3"', '"julia"')
    made = rebuilt(template, read_submission(text.encode(), template))
    assert made.metadata == template.notebook.metadata
    assert all(a.metadata == b.metadata for a, b in zip(made.cells, template.notebook.cells))
    assert next(c for c in made.cells if c.id == check).source == next(
        c for c in template.notebook.cells if c.id == check).source  # fmt: skip
    nbformat.validate(made)


def test_a_stub_that_was_left_is_found_by_its_line() -> None:
    assert stub_line("def f():\n    x = 1\n    raise NotImplementedError('4.1')") == 3
    assert stub_line("def f():\n    return 'raise NotImplementedError'") is None
    assert stub_line("def f(:") is None
