"""`course trace` as people run it."""

from __future__ import annotations

import json
import subprocess
import sys

from trace_samples import GEMM, kernel, one_step, step
from typer.testing import CliRunner

from course_lib.cli import app


def run(*arguments: object):
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


def test_table_sentence_and_diagnosis(write) -> None:
    done = run(write(one_step()))
    assert done.exit_code == 0
    for words in ("rank", "exposed", "50.00 %", "0.200", "50% of 0.4 ms of communication were hidden", "Diagnosis"):
        assert words in done.output


def test_three_answers_are_kept_apart(write) -> None:
    silent = run(write([step(1, 0, 100), kernel(GEMM, 10, 50, 1)])).output
    assert "No communication happened" in silent and "–" in silent
    blind = run(write([step(1, 0, 100)])).output
    assert "Cannot know" in blind and "unknown" in blind


def test_json_is_for_programs(write) -> None:
    found = json.loads(run(write(one_step()), "--json").output)
    assert found["pooled"]["hidden"] == 200_000 and found["pooled"]["overlap"] == 0.5
    assert found["rows"][0]["step"] == 1 and found["rows"][0]["wait"] is None
    assert found["files"][0]["device"] == "cuda"
    nothing = json.loads(run(write([]), "--json").output)
    assert nothing["pooled"]["comm"] is None and nothing["diagnosis"][0]["code"] == "no-events"


def test_the_page_needs_no_network(write, tmp_path) -> None:
    out = tmp_path / "report.html"
    done = run(write(one_step()), "--html", out)
    text = out.read_text()
    assert done.exit_code == 0 and str(out) in done.output
    assert text.count("data:image/png;base64,") == 2 and "://" not in text


def test_a_step_that_is_not_there(write) -> None:
    done = run(write(one_step()), "--step", 9)
    assert done.exit_code == 1 and "step 9 is not in this trace; it has 1" in done.stderr


def test_what_cannot_be_read_is_one_sentence(tmp_path) -> None:
    done = run(tmp_path / "none.json")
    assert done.exit_code == 1 and done.stderr.count("\n") == 1 and "does not exist" in done.stderr
    assert run(tmp_path, "--cpu", "all").exit_code == 2


def test_torch_is_never_imported(write) -> None:
    code = ("import sys, pathlib; from course_lib.trace.command import run; run([pathlib.Path(sys.argv[1])],"
            "html=pathlib.Path(sys.argv[1]).with_suffix('.html')); print('torch' in sys.modules)")
    command = [sys.executable, "-c", code, str(write(one_step()))]
    done = subprocess.run(command, text=True, capture_output=True, timeout=60)
    assert done.stdout.strip().endswith("False"), done.stderr
