"""The report as text and JSON, and the command from end to end."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from course_lib.cli import app
from course_lib.doctor import Finding, Report, Section, report

SECTIONS = ["versions", "notebooks", "devices", "fabrics", "environment", "machine", "noise"]
KEYS = {"key", "level", "title", "value", "detail", "remedy", "source", "data"}
GOOD = Finding("torch", "ok", "torch", "2.13.0", "needs >=2.11")
WARNING = Finding("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "warn",
                  "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "[bold]1", "said " * 40, "unset it", "a page")
BAD = Finding("temp", "fail", "temporary folder", "cannot be written", "no space", "set TMPDIR")


def made(*findings: Finding) -> Report:
    return Report((Section("versions", "Versions", findings), Section("environment", "Variables", ())), 1.234)


def text(found: Report) -> str:
    out = io.StringIO()
    report.as_text(found, out)
    return out.getvalue()


def test_text_fits_80_columns_without_a_terminal_and_keeps_names_whole() -> None:
    said = text(made(GOOD, WARNING))
    assert max(map(len, said.splitlines())) <= 80
    assert "\x1b" not in said and WARNING.title in said and "[bold]1" in said and "→ unset it" in said
    assert "nothing is set" in said and "Everything that a lab needs works here." in said


def test_text_names_what_will_stop_a_lab() -> None:
    said = text(made(GOOD, BAD))
    assert "Labs will not run: temporary folder." in said and "FAIL" in said and "→ set TMPDIR" in said


def test_json_has_stable_keys() -> None:
    found = report.as_json(made(GOOD, WARNING, BAD))
    assert list(found) == ["format", "course", "ok", "seconds", "counts", "sections"]
    assert found["counts"] == {"ok": 1, "note": 0, "warn": 1, "fail": 1} and found["ok"] is False
    assert all(set(finding) == KEYS for section in found["sections"].values() for finding in section)
    json.dumps(found)


@pytest.mark.parametrize(("findings", "code"), [((GOOD, WARNING), 0), ((GOOD, BAD), 1)])
@pytest.mark.parametrize("option", ["--json", ""])
def test_the_exit_code(findings: tuple[Finding, ...], code: int, option: str, monkeypatch) -> None:
    monkeypatch.setattr("course_lib.doctor.examine", lambda strategy: made(*findings))
    done = CliRunner().invoke(app, ["doctor", option] if option else ["doctor"])
    assert done.exit_code == code, done.output
    if option:
        assert json.loads(done.output)["ok"] == (code == 0)


def test_an_unknown_strategy_is_a_matter_of_usage() -> None:
    done = CliRunner().invoke(app, ["doctor", "--strategy", "horovod"])
    assert done.exit_code == 2 and "megatron-tp" in done.output


def doctor(tmp_path: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """`course doctor --json` in a process of its own; says on standard error whether torch was loaded in it."""
    code = ("import atexit, sys; from course_lib.cli import main; sys.argv = ['course', 'doctor', '--json'];"
            "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); main()")
    kept = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    return subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True, timeout=120,
                          env=kept | environ)


def test_everything_with_nothing_on_the_path(tmp_path: Path) -> None:
    """No ip, no tc, no nvidia-smi to be found on PATH: the paced fabric still carries every lab."""
    done = doctor(tmp_path, PATH=str(tmp_path), NCCL_NUM_THREADS="4")
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["ok"] else 1)
    assert found["ok"], [f for section in found["sections"].values() for f in section if f["level"] == "fail"]
    assert list(found["sections"]) == SECTIONS
    assert all(set(finding) == KEYS for section in found["sections"].values() for finding in section)
    fabrics = {finding["key"]: finding for finding in found["sections"]["fabrics"]}
    assert set(fabrics) == {"paced", "shaped", "nccl_fabric", "loopback", "auto"}
    assert fabrics["paced"]["data"]["works"] and fabrics["loopback"]["data"]["gbit"] > 0
    assert fabrics["auto"]["data"]["kind"] in ("shaped", "paced", "nccl")
    assert [f["data"]["verdict"] for f in found["sections"]["environment"] if f["key"] == "NCCL_NUM_THREADS"] == [
        "unknown"]
    assert done.stderr.split()[-1] == "False", "torch belongs into the ranks, not into this process"


@pytest.mark.slow
def test_a_variable_that_stops_every_rank(tmp_path: Path) -> None:
    done = doctor(tmp_path, TORCH_DISTRIBUTED_DEBUG="loud")
    found = json.loads(done.stdout)
    assert done.returncode == 1 and not found["ok"]
    failed = {f["key"] for section in found["sections"].values() for f in section if f["level"] == "fail"}
    assert {"TORCH_DISTRIBUTED_DEBUG", "paced", "loopback", "auto"} <= failed
    paced = next(f for f in found["sections"]["fabrics"] if f["key"] == "paced")
    assert "torch cannot be loaded" in paced["detail"] and "TORCH_DISTRIBUTED_DEBUG" in paced["detail"]
