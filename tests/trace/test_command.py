"""`course trace` as people run it."""

from __future__ import annotations

import json
import os
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


def two_ranks(write) -> None:
    """Rank 1 comes 50 and 200 us later than rank 0 to two collectives that overlap."""
    for rank, starts in enumerate(((300, 400), (350, 600))):
        names = ("ncclDevKernel_AllReduce_Sum_f32(x)", "ncclDevKernel_AllGather(x)")
        moved = [kernel(name, start, 800 - start, 0, 20 + i) for i, (name, start) in enumerate(zip(names, starts))]
        write([step(1, 0, 1000), kernel(GEMM, 100, 50, 0), *moved, step(2, 1000, 500)], f"run/rank-{rank}.json")


def test_wait_and_transfer_are_the_same_in_table_and_json(write, tmp_path) -> None:
    two_ranks(write)
    found = json.loads(run(tmp_path / "run", "--json").output)
    assert [(r["wait"], r["transfer"]) for r in found["rows"] if r["step"] == 1] == [(50_000, 450_000), (0, 450_000)]
    assert (found["pooled"]["wait"], found["pooled"]["transfer"]) == (50_000, 900_000)
    (line,) = (line for line in run(tmp_path / "run").output.splitlines() if line.count(" all ") == 2)
    assert [cell.strip() for cell in line.split("│")[-3:-1]] == ["0.050", "0.900"]


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


def test_a_step_time_that_cannot_be(write) -> None:
    for value in ("0", "-1", "nan", "inf"):
        done = run(write(one_step()), "--unprofiled-ms", value)
        assert done.exit_code == 2 and "above 0" in done.stderr


def test_thousands_of_steps_are_not_thousands_of_lines(write) -> None:
    many = [e for i in range(300) for e in (step(i, 2000 * i, 1000), kernel(GEMM, 2000 * i + 100, 400, 0))]
    said = run(write(many)).output
    assert said.count("\n") < 250 and "100 of 300 rows of single steps are not shown" in said
    assert "120.000" in said, "the pooled row counts all of them"
    assert len(json.loads(run(write(many), "--json").output)["rows"]) == 300
    assert "not shown" not in run(write(many[:2 * 200])).output


def test_a_name_that_no_encoding_has(write, tmp_path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"rank-\xff.json")
    with open(path, "wb") as file:
        file.write(write(one_step()).read_bytes())
    for options in ((), ("--json",), ("--html", str(tmp_path / "page.html"))):
        done = subprocess.run([sys.executable, "-m", "course_lib.cli", "trace", path, *options], capture_output=True,
                              timeout=60, env={**os.environ, "PYTHONIOENCODING": "ascii"})
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert options[:1] != ("--json",) or json.loads(done.stdout)["files"][0]["name"].endswith(".json")


def test_torch_is_never_imported(write) -> None:
    code = ("import sys, pathlib; from course_lib.trace.command import run; run([pathlib.Path(sys.argv[1])],"
            "html=pathlib.Path(sys.argv[1]).with_suffix('.html')); print('torch' in sys.modules)")
    command = [sys.executable, "-c", code, str(write(one_step()))]
    done = subprocess.run(command, text=True, capture_output=True, timeout=60)
    assert done.stdout.strip().endswith("False"), done.stderr
