"""What the sandbox says of a notebook's run is not believed: the notebook's code can have written it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from course_lib.grade import engine, sandbox, worker
from course_lib.grade.judge import Judged
from course_lib.grade.outcome import Judgement
from course_lib.grade.template import Submission, Template


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`left(report)`: the next run leaves this report."""

    def leaves(report: str) -> None:
        class Box:
            def __init__(self, work: Path) -> None:
                (work / "report.json").write_text(report)

            def wait(self, seconds: float) -> sandbox.Ended:
                return sandbox.Ended(0, b"")

        monkeypatch.setattr(sandbox, "start", lambda argv, *, work, limits: Box(work))

    sandbox.level()  # found out before nothing can be started any more
    return leaves


@pytest.mark.parametrize("outcome", ["grader_error", "impossible", "no such outcome", 5, None, ["ok"], {}])
def test_an_outcome_that_no_run_has_is_a_kernel_that_died(
    outcome: object, left, template: Template, submission: Callable[..., Submission]
) -> None:
    left(json.dumps({"outcome": outcome, "last": ["x"], "errors": []}))
    assert engine.run(template, submission(), []).outcome == "kernel_died"


@pytest.mark.parametrize("report", ["", json.dumps({"outcome": "ok", "last": None})], ids=["no engine", "no kernel"])
def test_an_engine_that_did_not_start_is_no_fault_of_the_notebook(
    report: str, left, template: Template, submission: Callable[..., Submission]
) -> None:
    left(report)
    with pytest.raises(RuntimeError, match="did not start"):
        engine.run(template, submission(), [])


def test_a_notebook_that_cannot_be_written_costs_nothing_but_itself(tmp_path: Path) -> None:
    class Evil(dict):
        def __getattr__(self, name: str) -> None:
            raise ValueError("x")

    worker._keep(Judged(Judgement("a", "04", (), "ok"), notebook=Evil()), tmp_path)
    assert "cannot be written: " in (tmp_path / "logs" / "a.log").read_text()
    assert (tmp_path / "results" / "a.json").exists() and not (tmp_path / "notebooks").exists()
