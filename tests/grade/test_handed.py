"""Whose file is judged, when folders, links, records and copies lie where submissions are looked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from course_lib.grade import handed
from course_lib.grade.handed import Handed, collect
from course_lib.grade.template import LARGEST_BYTES, Template


def _found(place: Path, template: Template, out: Path | None = None) -> dict[str, Handed]:
    return {each.id: each for each in collect(place, template, out)}


def test_links_are_not_followed(tmp_path: Path, template: Template) -> None:
    (tmp_path / "alice.ipynb").write_text("{}")
    (tmp_path / "eve.ipynb").symlink_to("alice.ipynb")
    (tmp_path / "mallory").mkdir()
    (tmp_path / "mallory" / "04.ipynb").symlink_to(tmp_path / "alice.ipynb")
    (tmp_path / "trent").symlink_to(tmp_path / "mallory")
    found = _found(tmp_path, template)
    assert found["alice"].file == tmp_path / "alice.ipynb"
    assert {name: (each.file, each.fault) for name, each in found.items() if name != "alice"} == dict.fromkeys(
        ("eve", "mallory", "trent"), (None, handed.LINK))  # fmt: skip


def test_a_pipe_an_empty_folder_and_what_archives_add_are_told_apart(tmp_path: Path, template: Template) -> None:
    os.mkfifo(tmp_path / "pipe.ipynb")
    (tmp_path / "empty").mkdir()
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / "__alice.ipynb").write_text("{}")
    (tmp_path / "bob" / "__MACOSX").mkdir(parents=True)
    (tmp_path / "bob" / "__MACOSX" / "04.ipynb").write_text("")
    (tmp_path / "bob" / "mine.ipynb").write_text("{}")
    found = _found(tmp_path, template)
    assert set(found) == {"pipe", "empty", "__alice", "bob"}
    assert "pipe" in found["pipe"].fault and "no file" in found["empty"].fault
    assert found["bob"].file == tmp_path / "bob" / "mine.ipynb"


def test_the_records_are_no_submission(tmp_path: Path, template: Template) -> None:
    (tmp_path / "alice.ipynb").write_text("{}")
    out = tmp_path / "records" / "04"
    out.mkdir(parents=True)
    (out / "04.ipynb").write_text("{}")
    assert set(_found(tmp_path, template, out)) == {"alice"}
    with pytest.raises(ValueError, match="folder of its own"):
        collect(tmp_path, template, tmp_path)


def test_a_copy_that_jupyter_made_is_not_taken_for_the_lab(tmp_path: Path, template: Template) -> None:
    folder = tmp_path / "alice"
    (folder / "old").mkdir(parents=True)
    lab = template.name
    for name in (f"{lab}-Copy1", f"{lab} (1)", "04_first try", lab, f"old/{lab}"):
        (folder / f"{name}.ipynb").write_text("{}")
    (one,) = collect(tmp_path, template)
    assert one.file == folder / f"{lab}.ipynb"
    assert one.flags == (f"5 notebooks were handed in; {lab}.ipynb was judged",)


def test_what_cannot_be_read_is_a_fault_of_one_submission(tmp_path: Path, template: Template, monkeypatch) -> None:
    with open(tmp_path / "big.ipynb", "wb") as file:
        file.truncate(LARGEST_BYTES * 1000)
    (big,) = collect(tmp_path, template)
    told, data = big.read()
    assert data == b"" and told.file is None and "more than 64 MB are not read" in told.fault

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    (tmp_path / "big.ipynb").unlink()
    (tmp_path / "shut.ipynb").touch()
    (shut,) = collect(tmp_path, template)
    assert shut.read()[0].fault == "it cannot be read: Permission denied"


def test_names_become_ids_that_fit_a_file_name(tmp_path: Path, template: Template) -> None:
    for name in ("a b.ipynb", "a_b.ipynb", "語" * 80 + ".ipynb", "e\u0301.ipynb"):
        (tmp_path / name).write_text("{}")
    os.close(os.open(os.fsencode(tmp_path) + b"/\xff\xfe.ipynb", os.O_CREAT))
    found = _found(tmp_path, template)
    assert {"a_b", "a_b_"} < set(found) and len(found) == 5
    assert all(len(f".{name}.html-12345678".encode()) < 200 for name in found)


def test_a_folder_that_can_only_be_listed_is_a_fault_of_one_submission(
    tmp_path: Path, template: Template, monkeypatch
) -> None:
    (tmp_path / "shut").mkdir()
    (tmp_path / "shut" / "04.ipynb").write_text("{}")
    (tmp_path / "bob.ipynb").write_text("{}")
    is_file = Path.is_file

    def refused(path: Path) -> bool:
        if path.parent.name == "shut":
            raise PermissionError(13, "Permission denied")
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    found = _found(tmp_path, template)
    assert found["bob"].file and found["shut"].fault == "it cannot be read: Permission denied"
