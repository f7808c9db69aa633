"""`python -m course_lib.train` on GPUs: every strategy and layout against the CPU, paused runs, torchrun and a kill."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from course_lib.job.metrics import rows
from course_lib.job.options import Options
from course_lib.launch import run
from course_lib.train import __main__ as command
from tests.gpu.given import DEVICE, FABRIC, exact, on
from tests.job.runs import alone, differs, options, parts_of, several, whole_and_in_two
from tests.job.test_command import until, worker_of

pytestmark = pytest.mark.gpu

SGD = {"optimizer": "sgd", "lr": 0.1, "heads": 4}
"""AdamW divides by the size of a gradient, and so magnifies what rounding does."""
CLOSE = 1e-4
ONE_PROCESS = {name: {"strategy": name, "layers": 1}
               for name in ("serial", "no_sync", "bucketed", "every-step", "zero1", "zero2", "zero3")}
ONE_PROCESS |= {"recompute": {"recompute": True}, "untied": {"untied": True, "strategy": "zero3"}}
CPU = {name: ({"strategy": name, "local_steps": 2}, CLOSE) for name in ("local-sgd", "diloco")}
"""These come to another result than one process does, so they are compared with the same ranks on the CPU."""
CPU |= {scheme: ({"compress": scheme, "layers": 1}, CLOSE) for scheme in ("fp16", "bf16", "powersgd")}
CPU |= {scheme: ({"compress": scheme, "layers": 1}, 5e-3) for scheme in ("onebit", "topk")}  # rounding turns a sign
CPU |= {"bf16 compute": ({"bf16": True}, 1e-3)}
LAYOUTS = {2: [{"pp": 2}, {"pp": 2, "bf16": True}, {"tp": 2}, {"tp": 2, "sequence_parallel": True},
               {"pp": 2, "recompute": True}],
           4: [{"pp": 4, "layers": 4}, {"pp": 2, "tp": 2}, {"tp": 4, "sequence_parallel": True}, {"pp": 2},
               {"tp": 2, "strategy": "every-step"}],
           8: [{"pp": 2, "tp": 2}, {"pp": 4, "layers": 4, "untied": True}, {"pp": 8, "layers": 8}, {"tp": 2},
               {"pp": 2, "tp": 2, "sequence_parallel": True, "layers": 4, "pipeline": "interleaved"}]}
PIPELINES = ("gpipe", "interleaved", "zero-bubble", "zb-v")
LAYOUTS[2] += [{"pp": 2, "layers": 4, "pipeline": name} for name in PIPELINES]
LAYOUTS[8] += [{"pp": 4, "layers": 8, "pipeline": name} for name in PIPELINES]


def body(runs: list[Options]) -> None:
    exact()
    whole_and_in_two(runs)


def on_the_cpu(one: Options, ranks: int) -> tuple[dict, list]:
    """What `differs` wants, of the same ranks on the CPU."""
    one = replace(one, out=one.out.with_name("cpu"))
    run(several, [one], ranks=ranks, fabric="loopback")
    lines = [{"loss": row["loss"], "grad_norm": row["grad_norm"]} for row in rows(one.out / "metrics.jsonl")]
    return torch.load(one.out / "model.pt", weights_only=True)["model"], lines


def ends_there(one: Options, ranks: int, want: tuple[dict, list], tolerance: float = CLOSE) -> None:
    """Three updates in one go, and with a pause, a checkpoint and new models between them."""
    run(body, [one], ranks=ranks, fabric=FABRIC)
    for out in (one.out, parts_of(one)):
        assert not differs(replace(one, out=out), want, tolerance), out.name


@pytest.mark.parametrize("ranks", on(1, 2, 8))
@pytest.mark.parametrize("name", ONE_PROCESS)
def test_every_strategy_ends_where_one_process_does(name: str, ranks: int, tmp_path: Path) -> None:
    one = options(tmp_path / "out", **SGD, **ONE_PROCESS[name])
    ends_there(one, ranks, alone(one, ranks))


@pytest.mark.parametrize("ranks", on(1, 2, 8))
@pytest.mark.parametrize("name", CPU)
def test_what_changes_the_result_changes_it_as_on_the_cpu(name: str, ranks: int, tmp_path: Path) -> None:
    how, tolerance = CPU[name]
    one = options(tmp_path / "out", **SGD, **how)
    ends_there(one, ranks, on_the_cpu(one, ranks), tolerance)


def said(how: dict) -> str:
    return ", ".join(f"{key} {value}" for key, value in how.items())


@pytest.mark.parametrize(("ranks", "how"), [
    pytest.param(*case.values, how, marks=case.marks, id=f"{case.values[0]}: {said(how)}")
    for case in on(*LAYOUTS) for how in LAYOUTS[case.values[0]]])
def test_every_layout_ends_where_one_process_does(ranks: int, how: dict, tmp_path: Path) -> None:
    one = options(tmp_path / "out", **SGD, **{"micro_steps": 4} | how)
    if one.bf16:
        ends_there(one, ranks, on_the_cpu(one, ranks), 1e-3)
    else:
        ends_there(one, ranks, alone(one, ranks))


STEPS, EVERY = 100, 10
ARGUMENTS = ("--layers 2 --heads 4 --width 16 --length 16 --batch 2 --micro-steps 2 --data-mb 0.02 --optimizer sgd "
             f"--lr 0.02 --max-norm 1 --steps {STEPS} --checkpoint-every {EVERY} --trace-steps 2-3").split()


def asked(out: Path, *more: str) -> Options:
    given = vars(command.parser().parse_args([*ARGUMENTS, *more, "--out", str(out)]))
    return Options(**{key: value for key, value in given.items() if key in Options.__dataclass_fields__})


def want_of(out: Path, ranks: int, *more: str) -> tuple[dict, list]:
    return alone(asked(out, *more), ranks)


def the_trace_has(out: Path, ranks: int) -> None:
    from course_lib.trace.reader import load
    trace = load(out / "trace")
    assert [rank.rank for rank in trace.ranks] == list(range(ranks)) and list(trace.timeline.steps) == [2, 3]
    assert DEVICE == "cpu" or trace.timeline.select(kind="compute"), "no kernels"


@pytest.mark.parametrize("ranks", on(1, 2, 8))
def test_the_command_takes_the_gpus_of_this_machine(ranks: int, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "course_lib.train", *ARGUMENTS, "--ranks", str(ranks), "--strategy",
                           "zero3", "--out", str(tmp_path / "out")], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert not differs(asked(tmp_path / "out"), want_of(tmp_path, ranks), 1e-3)
    the_trace_has(tmp_path / "out", ranks)
    assert DEVICE == "cpu" or rows(tmp_path / "out" / "metrics.jsonl")[0]["sent_bytes"] is None, "it ran on a Wire"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the rank to kill in /proc")
@pytest.mark.parametrize(("ranks", "more"), [
    pytest.param(*case.values, more, marks=case.marks, id=f"{case.values[0]}: {more}")
    for case in on(1, 2, 8) for more in {1: ["--strategy zero2"], 2: ["--strategy zero2", "--pp 2", "--tp 2"],
                                         8: ["--strategy zero3", "--pp 2 --tp 2"]}[case.values[0]]])
def test_torchrun_goes_on_after_a_kill_as_if_nothing_had_been(ranks: int, more: str, tmp_path: Path) -> None:
    out, metrics, log = tmp_path / "out", tmp_path / "out" / "metrics.jsonl", tmp_path / "log"
    agent = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone",
                              f"--nproc-per-node={ranks}", "--max-restarts=3", "-m", "course_lib.train", *ARGUMENTS,
                              *more.split(), "--out", str(out)], stdout=log.open("w"), stderr=subprocess.STDOUT,
                             start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        until(lambda: agent.poll() is not None or (metrics.exists() and len(rows(metrics)) > EVERY + 2))
        assert agent.poll() is None, log.read_text()
        os.kill(worker_of(agent), signal.SIGKILL)
        code = agent.wait(150)
    finally:
        agent.poll() is None and os.killpg(agent.pid, signal.SIGKILL)
    text = log.read_text()
    assert code == 0 and "exitcode: -9" in text and re.search(r"goes on after update [1-9]0", text), text
    assert not differs(asked(out, *more.split()), want_of(out, ranks, *more.split()), 1e-3)
