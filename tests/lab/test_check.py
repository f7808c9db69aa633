"""`check`, `hint`, `begin` and what they remember."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import pytest

from course_lib import lab
from course_lib.lab import guard, store
from course_lib.lab.model import CheckResult, Row, exercise
from course_lib.lab.opening import missing
from course_lib.lab.present import result_as_html, result_as_text


def right(sizes, cap):
    from tests.lab.test_lab04 import assign_buckets

    return assign_buckets(sizes, cap)


def stub(sizes, cap):
    raise NotImplementedError("exercise 4.1")


def test_a_right_answer_shows_its_table_and_is_remembered(capsys: pytest.CaptureFixture, learner: Path) -> None:
    lab.check("4.1", right, seed=3)
    out = capsys.readouterr().out
    assert "all 7 passed" in out and "✘" not in out and "seed 3" in out
    entry = json.loads((learner / "progress.json").read_text())["4.1"]
    assert entry["passed"] and entry["attempts"] == 1 and entry["first_passed"] == entry["last_tried"]


def test_a_wrong_answer_shows_the_table_then_raises_one_line(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(lab.CheckFailed) as failure:
        lab.check("4.1", lambda sizes, cap: [[i for i, _ in sizes]])
    out = capsys.readouterr().out
    assert "expected:" in out and "What this looks like:" in out
    assert failure.value._render_traceback_() == [str(failure.value)]
    assert "✘ exercise 4.1:" in str(failure.value) and "\n" not in str(failure.value)
    assert lab.progress()["4.1"]["passed"] is False


def test_once_passed_stays_passed() -> None:
    lab.check("4.1", right)
    with pytest.raises(lab.CheckFailed):
        lab.check("4.1", lambda sizes, cap: None)
    assert lab.progress()["4.1"]["passed"] and lab.progress()["4.1"]["attempts"] == 2


def test_a_stub_is_told_in_a_sentence_and_is_no_attempt(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(lab.CheckFailed, match=r"exercise 4\.1 is not written yet"):
        lab.check("4.1", stub)
    assert capsys.readouterr().out == "" and lab.progress() == {}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("4.1",), r'Pass what you wrote in exercise 4.1: check\("4.1", assign_buckets\)'),
        (("4.1", [[0]]), "Pass the function itself, without calling it"),
    ],
)
def test_misuse_is_told_in_a_sentence(arguments: tuple, says: str) -> None:
    with pytest.raises(lab.CheckFailed, match=says):
        lab.check(*arguments)


@pytest.mark.parametrize("number", ["4.99", "77.1", "", "four", 4.1])
def test_an_unknown_exercise_lists_the_known_ones(number) -> None:
    for ask in (lab.check, lab.hint):
        with pytest.raises(lab.LabError, match=r"known ones are: .*4\.1 \(assign parameters to buckets\), 4\.2"):
            ask(number)


def test_an_endless_loop_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from course_lib.lab import checking

    def endless(sizes, cap):
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    monkeypatch.setattr(checking, "SECONDS", 0.2)
    result = lab.evaluate("4.1", endless)
    assert not result.ok and "still running" in result.rows[0].seen


def test_the_row_of_an_exception_points_at_the_learners_line() -> None:
    def answer(sizes, cap):
        return {}["gone"]

    with pytest.raises(guard.Broke, match=r"f\(\) raised KeyError: 'gone' in line \d+: return {}\[\"gone\"\]"):
        guard.call(answer, [], 1, shown="f()")


def test_hints_come_one_by_one_and_are_remembered(capsys: pytest.CaptureFixture) -> None:
    shown = []
    for _ in range(4):
        lab.hint("4.1")
        shown.append(capsys.readouterr().out)
    assert [text.count("Hint ") for text in shown] == [1, 2, 3, 3]
    assert "about 10 minutes" in shown[0] and 'hint("4.1") shows the next' in shown[0]
    assert "There are no more" in shown[2] and shown[3] == shown[2]
    assert lab.progress()["4.1"]["hints"] == 3


def test_three_hints_or_none() -> None:
    with pytest.raises(ValueError, match="needs three steps"):
        exercise("4.9", title="t", minutes=1, needs="f", hints=("a",), mistakes={})


def test_the_table_is_escaped_and_has_words_for_screen_readers() -> None:
    rows = (Row("a < b", True), Row("c & d", False, "<x>", "</table>"))
    result = CheckResult("4.1", "t", rows, 5, "m", "Look at <b>.")
    html = result_as_html(result)
    assert "a &lt; b" in html and "&lt;/table&gt;" in html and html.count("</table>") == 1
    for needed in (
        "<caption",
        'scope="col"',
        'scope="row"',
        'aria-label="passed"',
        'aria-label="failed"',
        "color:inherit",
    ):
        assert needed in html
    assert "1 of 2 failed" in html and "1 of 2 failed" in result_as_text(result)


def test_no_rows_prove_nothing() -> None:
    assert not CheckResult("4.1", "t", (), 0).ok


def test_missing_names_are_explained_only_when_an_exercise_defines_them() -> None:
    assert "`assign_buckets` does not exist yet: run the cell of exercise 4.1 first" in missing("assign_buckets")
    assert missing("asign_buckets") == "" and missing(None) == ""


@pytest.mark.parametrize("device, there, said", [
    ("gpu", 2, "choose one of auto, cpu, cuda"), ("cuda", 0, "shows no CUDA device"),
    ("cuda", 2, "emulates its devices"), ("cpu", 2, ""), ("auto", 0, "")])
def test_what_a_device_means_is_said(device: str, there: int, said: str, capsys: pytest.CaptureFixture,
                                     monkeypatch: pytest.MonkeyPatch, learner: Path) -> None:
    monkeypatch.setattr("course_lib.lab.opening.gpus", lambda: there)
    if said and said != "emulates its devices":
        with pytest.raises(lab.LabError, match=said):
            lab.begin(device=device)
    else:
        lab.begin(device=device)
        told = capsys.readouterr().out
        assert said in told and ("fabric='nccl'" in told) == bool(told) == bool(said)


def test_a_folder_that_cannot_be_written_is_told_and_survived(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, learner: Path
) -> None:
    (learner / "file").touch()
    monkeypatch.setenv("COURSE_DIR", str(learner / "file" / "below"))
    lab.begin()
    assert "cannot be written" in capsys.readouterr().out
    lab.hint("4.1")
    lab.hint("4.1")
    assert "Hint 2" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["{", "[]", '{"4.1": 3}', "\udcff"])
def test_an_unreadable_record_is_put_aside(learner: Path, content: str) -> None:
    (learner / "progress.json").write_bytes(content.encode(errors="surrogateescape"))
    lab.hint("4.1")
    assert lab.progress() == {"4.1": {"hints": 1}}
    assert (learner / "progress.unreadable").exists()


def test_a_failed_write_leaves_the_old_record(learner: Path) -> None:
    lab.hint("4.1")
    before = (learner / "progress.json").read_text()
    with pytest.raises(TypeError), store.update("progress") as records:
        records["4.1"]["hints"] = object()
    assert (learner / "progress.json").read_text() == before
    assert sorted(path.name for path in learner.iterdir()) == [".lock", "progress.json"]


def test_a_submission_that_is_not_there_is_refused() -> None:
    with pytest.raises(lab.LabError, match=r"no file 'alice\.ipynb'"):
        lab.begin("alice.ipynb")
