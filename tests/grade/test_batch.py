"""A folder is graded, recorded and taken up again; one bad submission never stops it."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from course_lib.cli import app
from course_lib.grade import batch, records
from course_lib.grade.judge import judge
from course_lib.grade.outcome import Judgement, Part
from course_lib.grade.template import Template
from course_lib.lab import begin
from course_lib.lab.notebook import as_text, learner_notebook, read_solution
from tests.grade.conftest import command_lines

ROOT = Path(__file__).resolve().parents[2]
SOLUTION = ROOT / "solutions" / "04_gradient_buckets.py"


@pytest.fixture
def folder(tmp_path: Path, notebook: Callable[..., str]) -> Path:
    """A stub, a text, an empty folder, and a folder with a wrong answer in it."""
    place = tmp_path / "submissions"
    (place / "eve").mkdir(parents=True)
    (place / "mallory").mkdir()
    (place / "bob.ipynb").write_text(as_text(learner_notebook(SOLUTION, read_solution(SOLUTION))))
    (place / "carol.txt").write_text("I could not do it.\n")
    wrong = "def assign_buckets(sizes_bytes, cap_bytes):\n    return []"
    (place / "mallory" / "04.ipynb").write_text(notebook({"4.1": wrong, "4.3": "raise NotImplementedError"}))
    (place / ".hidden").write_text("")
    return place


def _grade(place: Path, out: Path, **options: object) -> tuple[dict[str, Judgement], list[str]]:
    said: list[str] = []
    options = {"notebook": False, "only": ["bob", "carol", "eve"], "jobs": 2} | options
    found = batch.grade("4", place, out, root=ROOT, say=said.append, **options)
    return {judgement.id: judgement for judgement in found}, said


def test_a_folder_is_graded_and_recorded(folder: Path, tmp_path: Path) -> None:
    found, _ = _grade(folder, tmp_path / "out")
    assert {name: j.status for name, j in found.items()} == {
        "bob": "stub_left", "carol": "unreadable", "eve": "unreadable"}  # fmt: skip
    with open(tmp_path / "out" / "grades.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == records.COLUMNS
    assert [row["id"] for row in rows] == ["bob", "carol", "eve"]
    assert rows[0]["points"] == "0"
    assert "line 1, offset 0" in rows[1]["note"]
    for name in found:
        page = (tmp_path / "out" / "feedback" / f"{name}.html").read_text()
        assert page.startswith("<!doctype html>")
        assert "http" not in page
        result = json.loads((tmp_path / "out" / "results" / f"{name}.json").read_text())
        assert result["score"] == 0
        assert all(test["max_score"] for test in result["tests"])


def test_what_is_in_the_journal_is_not_judged_again(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _grade(folder, out, only=["bob", "carol"])
    journal = out / "journal.jsonl"
    with open(journal, "a") as file:
        file.write('{"id": "cut off by a cra')
    found, said = _grade(folder, out, only=["bob", "carol"])
    assert all("in the journal already" in line for line in said)
    assert found["bob"].status == "stub_left"
    (folder / "carol.txt").write_text("I still could not do it.\n")
    _, said = _grade(folder, out, only=["bob", "carol"])
    assert next(line for line in said if line.startswith("[")).startswith("[2/2] carol: unreadable")
    _, said = _grade(folder, out, only=["carol"], regrade=True)
    assert not any("in the journal" in line for line in said)
    with open(out / "grades.csv", newline="") as file:
        assert [row["id"] for row in csv.DictReader(file)] == ["bob", "carol"]


def test_a_wrong_answer_is_not_measured_and_the_page_shows_no_solution(
    folder: Path, tmp_path: Path, sources: dict[str, str]
) -> None:
    found, _ = _grade(folder, tmp_path / "out", only=["mallory"])
    parts = {part.id: part for part in found["mallory"].parts}
    assert found["mallory"].status == "failed_checks"
    assert (parts["4.1"].points, parts["4.2"].points) == (0, 10)
    assert "Not measured: this needs exercise 4.1" in parts["measured"].sentence
    page = (tmp_path / "out" / "feedback" / "mallory.html").read_text()
    telling = {line.strip() for line in sources["4.1"].splitlines() if len(line.strip()) > 20} - {
        "def assign_buckets(sizes_bytes, cap_bytes):"}  # fmt: skip
    assert telling
    assert not any(line in page for line in telling)


def test_a_worker_that_fails_is_the_graders_fault(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(batch, "WORKER_SECONDS", 0.01)
    found, _ = _grade(folder, tmp_path / "out", only=["bob"])
    assert found["bob"].status == "grader_error"
    assert found["bob"].points is None
    assert batch.exit_code(list(found.values())) == batch.GRADER_BUG
    with open(tmp_path / "out" / "grades.csv", newline="") as file:
        assert next(csv.DictReader(file))["points"] == ""


def test_a_notebook_of_another_lab_is_told_so(template: Template) -> None:
    found = judge("x", b'{"cells": [], "nbformat": 4}', template, seed=1, notebook=False).judgement
    assert found.status == "template_mismatch"
    assert "4.1, 4.2" in found.note


def test_a_learners_module_in_the_folder_it_is_run_from_is_not_imported(
    folder: Path, tmp_path: Path, monkeypatch
) -> None:
    (folder / "json.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (folder / "torch.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(folder)
    found, _ = _grade(folder, tmp_path / "out", only=["bob"])
    assert found["bob"].status == "stub_left"
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_nor_is_it_where_a_notebook_asks_for_a_verdict(folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    (folder / "json.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(folder)
    begin(submission="bob.ipynb")
    assert "stub_left" in capsys.readouterr().out
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("handed_in", [["solutions"], ["labs"], ["solutions", "labs", "course_lib", ".course"]])
def test_the_course_is_not_taken_from_among_submissions(handed_in: list[str], folder: Path, monkeypatch) -> None:
    """A whole tree that a learner hands in is none either: labs and checks come from the library that grades."""
    for name in handed_in:
        (folder / name).mkdir()
    (folder / "solutions").mkdir(exist_ok=True)
    (folder / "solutions" / "04_gradient_buckets.py").write_text("# %% [markdown]\n# nothing to do here\n")
    monkeypatch.chdir(folder)
    assert batch.find_root() == ROOT == batch.find_root(folder)


def test_a_library_that_is_installed_alone_finds_the_course_around_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(batch.sandbox, "PACKAGE", tmp_path / "site-packages" / "course_lib")
    for name in ("site-packages/course_lib", "course/course_lib", "course/labs/deep", "handed_in/solutions"):
        (tmp_path / name).mkdir(parents=True)
    assert batch.find_root(tmp_path / "course" / "labs" / "deep") == tmp_path / "course"
    with pytest.raises(FileNotFoundError, match="no labs/ beside a course_lib/"):
        batch.find_root(tmp_path / "handed_in")


def test_records_among_the_submissions_are_not_graded_the_next_time(folder: Path) -> None:
    for _ in range(2):
        found, _ = _grade(folder, folder / "out", only=["eve"])
        assert found["eve"].note == "Nothing to judge: the folder has no file in it."
    with pytest.raises(ValueError, match="nobody is called out"):
        _grade(folder, folder / "out", only=["out"])


def test_two_graders_do_not_write_to_one_folder(folder: Path, tmp_path: Path) -> None:
    journal = records.Journal(tmp_path / "out" / "journal.jsonl")
    with journal.alone(), pytest.raises(OSError, match="another grader is writing to"):
        _grade(folder, tmp_path / "out", only=["carol"])
    assert _grade(folder, tmp_path / "out", only=["carol"])[0]["carol"].status == "unreadable"


def test_an_interrupt_leaves_no_folder_and_records_nothing_that_was_not_judged(
    folder: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()

    def interrupt(judgement: Judgement) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "line_of", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _grade(folder, tmp_path / "out", only=["bob", "carol", "eve"], jobs=3)
    assert list((tmp_path / "temporary").iterdir()) == []
    entries = [json.loads(line) for line in (tmp_path / "out" / "journal.jsonl").read_text().splitlines()]
    assert entries and all(entry["judgement"]["status"] != "grader_error" for entry in entries)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_batch_that_is_ended_leaves_no_process_and_no_folder(
    tmp_path: Path, notebook: Callable[..., str], number: int
) -> None:
    mark = f"course-batch-{os.getpid()}-{number}"
    sleeps = f"import subprocess\nsubprocess.run(['python3', '-c', 'import time; print(1); time.sleep(60) # {mark}'])"
    (tmp_path / "in").mkdir()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "in" / "eve.ipynb").write_text(notebook({"4.1": sleeps}))
    command = [sys.executable, "-c", "from course_lib.cli import main; main()", "grade", "04", "in", "--out", "out"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")}
    # whoever runs the tests in the background ignores some of these, and so would the batch
    course = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))
    for _ in range(300):
        if mark in command_lines():
            break
        time.sleep(0.1)
    else:
        pytest.fail("the submission's process never ran, so there was nothing to leave behind")
    course.send_signal(number)
    _, said = course.communicate(timeout=30)
    assert (course.returncode, b"interrupted" in said) == (130, True), said
    assert mark not in command_lines()
    assert list((tmp_path / "tmp").iterdir()) == []
    assert (tmp_path / "out" / "journal.jsonl").read_text() == ""


def test_the_journal_keeps_what_has_odd_line_ends(tmp_path: Path) -> None:
    journal = records.Journal(tmp_path / "journal.jsonl")
    said = "one\u2028two\x85three\x1cfour\nfive"
    journal.append("key", Judgement("a", "04", (), "ok", note=said))
    assert journal.read()["a", "key"].note == said


def test_points_that_a_person_decides_are_no_zero_for_gradescope(tmp_path: Path) -> None:
    parts = (Part("4.1", "t", "ok", 10.0, 10.0), Part("measured", "t", "impossible", None, 10.0))
    records.write_result(tmp_path / "a.json", Judgement("a", "04", parts, "impossible"))
    result = json.loads((tmp_path / "a.json").read_text())
    assert [test.get("score") for test in result["tests"]] == [10.0, None]
    assert "score" not in result and "score" not in result["tests"][1]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        records.replace_file(tmp_path / "x", "y")
    assert list(tmp_path.iterdir()) == []


def test_exit_codes_tell_when_a_person_is_needed() -> None:
    def one(status: str) -> Judgement:
        return Judgement("a", "04", (Part("4.1", "t", status, None, 10.0),), status)

    assert batch.exit_code([one("ok"), one("timeout")]) == 0
    assert batch.exit_code([one("ok"), one("impossible")]) == 1
    assert batch.exit_code([one("timing_unstable"), one("grader_error")]) == 4
    assert "–" in batch.line_of(one("impossible"))


@pytest.mark.parametrize("arguments", [
    ["grade"], ["grade", "04"], ["grade", "04", "nowhere", "--out", "x"], ["grade", "04", "."],
    ["grade", "77", ".", "--out", "x"], ["grade", "04", ".", "--out", "x", "--self-check"],
])  # fmt: skip
def test_wrong_usage_is_code_2_and_one_sentence(arguments: list[str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "x").exists()


def test_isolation_can_be_required(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("course_lib.grade.sandbox.level", lambda: "weak")
    done = CliRunner().invoke(app, ["grade", "04", str(tmp_path), "--out", str(tmp_path / "x"), "--require-isolation"])
    assert done.exit_code == 3
    assert "--require-isolation" in done.stderr


def test_a_table_cell_is_no_formula(tmp_path: Path) -> None:
    judgement = Judgement("=1+1", "04", (), "ok", note="@x\ny", fair_score=-0.5)
    records.write_grades(tmp_path / "grades.csv", [judgement, Judgement("-1+1", "04", (), "ok")])
    assert (tmp_path / "grades.csv").read_text().splitlines()[1].startswith('"\'=1+1","04","ok"')
    assert '"\'@x y"' in (tmp_path / "grades.csv").read_text()
    assert '"\'-1+1"' in (tmp_path / "grades.csv").read_text() and '"-0.500"' in (tmp_path / "grades.csv").read_text()
