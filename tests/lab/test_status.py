"""`course status` on made-up folders."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from course_lib.cli import app
from course_lib.lab import prediction, record
from course_lib.lab.status import NoSuchFolder, status
from course_lib.lab.status_text import as_text, next_exercise


def notebook(path: Path, run: int, cells: int = 3, heading: str = "# 04 · Gradient buckets") -> None:
    code = [{"cell_type": "code", "execution_count": i + 1 if i < run else None, "metadata": {}, "outputs": [],
             "source": ["lab.predict(\n", f'    "4.question_{i}", "How long?", unit="ms")']} for i in range(cells)]
    top = {"cell_type": "markdown", "metadata": {}, "source": [heading, "\n", "text"]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cells": [top, *code], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))


def records(folder: Path, progress: dict, predictions: dict | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "progress.json").write_text(json.dumps(progress))
    (folder / "predictions.json").write_text(json.dumps(predictions or {}))


PASSED = {"attempts": 3, "passed": True, "hints": 1, "first_passed": "2026-03-01T10:00:00+00:00",
          "last_tried": "2026-03-02T10:00:00+00:00"}


def text(folder: Path) -> str:
    out = io.StringIO()
    as_text(status(folder), out)
    return out.getvalue()


def test_what_a_learner_did(tmp_path: Path) -> None:
    notebook(tmp_path / "labs" / "04_gradient_buckets.ipynb", run=0)
    records(tmp_path / "labs" / ".course", {"4.1": PASSED, "4.2": {"attempts": 2, "passed": False, "hints": 3}},
            {"4.question_0": {"question": "How long?", "unit": "ms", "answer": 4.0}})
    (lab,) = status(tmp_path).labs
    assert (lab.number, lab.title, lab.passed, lab.attempted, lab.hints) == ("04", "Gradient buckets", 1, 2, 4)
    assert (lab.predictions, lab.questions, lab.cells_run, lab.cells) == (1, 3, 0, 3)
    assert lab.last_touched == PASSED["last_tried"], "a notebook that nobody ran was not touched"
    assert len(lab.exercises) == 5 and lab.exercises[0].title


def test_a_notebook_that_was_run_counts_as_touched(tmp_path: Path) -> None:
    notebook(tmp_path / "04_gradient_buckets.ipynb", run=2)
    os.utime(tmp_path / "04_gradient_buckets.ipynb", (1_800_000_000,) * 2)
    (lab,) = status(tmp_path).labs
    assert lab.cells_run == 2 and lab.last_touched.startswith("2027-01-15")


def test_the_copy_in_which_most_was_run_is_taken(tmp_path: Path) -> None:
    notebook(tmp_path / "04_a.ipynb", run=1)
    notebook(tmp_path / "labs" / "04_b.ipynb", run=3)
    assert status(tmp_path).labs[0].notebook.endswith("04_b.ipynb")


def test_records_as_the_labs_write_them(learner: Path) -> None:
    record.note_attempt("4.1", passed=False)
    record.note_attempt("4.1", passed=True)
    record.reveal_hint("4.2", of=3)
    prediction.predict("4.best", "Which?", unit="MB", answer=4)
    (learner / "labs").mkdir()
    found = status()  # COURSE_DIR names the learner's folder
    (lab,) = (lab for lab in found.labs if lab.number == "04")
    assert (lab.passed, lab.attempted, lab.hints, lab.predictions) == (1, 1, 1, 1)
    assert next_exercise(found).number == "4.2"


def test_two_folders_of_one_learner_are_added_up(tmp_path: Path) -> None:
    records(tmp_path / ".course", {"4.1": {"attempts": 1, "passed": False, "last_tried": "2026-01-01T00:00:00+00:00"}})
    records(tmp_path / "labs" / ".course", {"4.1": PASSED})
    first = status(tmp_path).labs[0].exercises[0]
    assert (first.attempts, first.passed, first.last_tried) == (4, True, PASSED["last_tried"])


@pytest.mark.parametrize("broken", ["{", "[]", '{"4.1": 3}', "\x00", pytest.param('{"a":' * 100_000, id="deep")])
def test_unreadable_records_are_named_and_left_alone(tmp_path: Path, broken: str) -> None:
    notebook(tmp_path / "04_gradient_buckets.ipynb", run=0)
    records(tmp_path / ".course", {})
    (tmp_path / ".course" / "progress.json").write_text(broken)
    assert status(tmp_path).unreadable == (str(tmp_path / ".course" / "progress.json"),)
    assert "Not readable:" in text(tmp_path)
    assert (tmp_path / ".course" / "progress.json").read_text() == broken


def test_odd_values_in_records_do_no_harm(tmp_path: Path) -> None:
    records(tmp_path / ".course", {"4.1": {"attempts": "many", "passed": 1, "hints": -2, "last_tried": None},
                                   "nonsense": {}, "99.7": {"attempts": 1}, "4.x": {}, f"4.{'9' * 5000}": {}},
            {"4.q": {}})
    labs = {lab.number: lab for lab in status(tmp_path).labs}
    assert (labs["04"].exercises[0].attempts, labs["04"].hints, labs["04"].predictions) == (0, 0, 0)
    assert labs["99"].exercises[0].number == "99.7"
    assert "99 lab 99" in text(tmp_path)


@pytest.mark.parametrize("content", ["no json", "[]", '{"cells": [3]}', '{"cells": [{"cell_type": "code"}]}',
                                     pytest.param("[" * 100_000, id="deep")])
def test_a_notebook_that_is_damaged_is_named(tmp_path: Path, content: str) -> None:
    broken = tmp_path / "04_broken.ipynb"
    broken.write_text(content)
    assert not status(tmp_path).found and status(tmp_path).unreadable == (str(broken),)
    done = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert done.exit_code == 1 and str(broken) in done.stderr and "no lab notebooks" not in done.stderr
    notebook(tmp_path / "05_measure_it.ipynb", run=0)
    assert [lab.number for lab in status(tmp_path).labs] == ["05"]
    assert "Not readable:" in text(tmp_path)


def test_notebooks_without_records(tmp_path: Path) -> None:
    notebook(tmp_path / "04_gradient_buckets.ipynb", run=0)
    said = text(tmp_path)
    assert "No records of progress yet" in said and "0/5" in said
    assert max(map(len, said.splitlines())) <= 80


def test_everything_passed(tmp_path: Path) -> None:
    notebook(tmp_path / "04_gradient_buckets.ipynb", run=3)
    records(tmp_path / ".course", {f"4.{i}": PASSED for i in range(1, 6)})
    assert "Every exercise of these labs is passed." in text(tmp_path)


def test_an_empty_folder_says_what_to_do(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert done.exit_code == 1 and "course status FOLDER" in done.output
    done = CliRunner().invoke(app, ["status", str(tmp_path), "--json"])
    assert done.exit_code == 1 and json.loads(done.output)["found"] is False


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(NoSuchFolder):
        status(tmp_path / "none")
    done = CliRunner().invoke(app, ["status", str(tmp_path / "none")])
    assert done.exit_code == 2 and "there is no folder" in done.output


def test_json_has_stable_keys(tmp_path: Path) -> None:
    notebook(tmp_path / "04_gradient_buckets.ipynb", run=1)
    records(tmp_path / ".course", {"4.1": PASSED})
    done = CliRunner().invoke(app, ["status", str(tmp_path), "--json"])
    found = json.loads(done.output)
    assert done.exit_code == 0
    assert set(found) == {"format", "folder", "records", "unreadable", "labs", "found"}
    assert set(found["labs"][0]) == {"number", "title", "notebook", "exercises", "predictions", "questions",
                                     "cells_run", "cells", "last_touched", "passed", "attempted", "hints"}
    assert set(found["labs"][0]["exercises"][0]) == {"number", "title", "attempts", "passed", "hints", "first_passed",
                                                     "last_tried"}
