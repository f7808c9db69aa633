"""`python -m course_lib.train` as people call it: refusals, torchrun on two nodes, a kill, and what is left."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from course_lib.job import checkpoint, lock
from course_lib.job.batches import Batches
from course_lib.job.loop import train
from course_lib.job.metrics import rows
from course_lib.job.options import MOST, Options
from course_lib.job.progress import interrupted
from course_lib.job.together import Diverged, JobError, together
from course_lib.launch import RankFailed, run
from course_lib.train import __main__ as command
from course_lib.train.control import Control
from tests.job.runs import options, same_bits, several

REFUSED = {  # arguments, and what the sentence must name
    "--strategy zero9": "zero9", "--pp 3": "multiple of 3", "--dp 3": "start 3", "--tp 2 --pp 2": "multiple of 4",
    "--strategy zero3 --compress topk": "--strategy bucketed", "--pp 2 --strategy local-sgd": "use bucketed",
    "--pp 2 --compress bf16": "leave --pp", "--tp 2 --strategy zero1": "leave --tp out", "--heads 3": "divisor",
    "--tp 2 --heads 1": "--heads 1", "--sequence-parallel": "--tp", "--pp 2 --layers 1": "each stage a layer",
    "--pp 2 --layers 3 --pipeline zb-v": "4 stages", "--steps 0": "1 or more",
    "--global-batch 9": "B = 9 is not a multiple of b·D = 4·2 = 8.* Choose B = 8 or 16",
    "--global-batch 6": "--batch 4 on 2 replicas: .* more than B = 6",
    "--topk 2 --compress topk": "at most 1", "--trace-steps 5-3": "or a range", "--trace-steps x": "or a range",
    "--data nowhere.txt": "no such file", "--lr 0": "above 0", "--momentum 1": "not including, 1", "--nodes 3": "nodes",
    "--fabric slow": "slow", "--inter 1GbE": "nodes=2", "--step 3": "--step", "--ranks 0": "--ranks 0",
    "--ranks -1": "--ranks -1: .* 1 or more", f"--seed {10**22}": "--seed 10000.* or less",
    f"--warmup {10**400}": "--warmup 1000.* or less",
    f"--seed -{10**22}": "--seed -10000.*of -[0-9]+ or more", "--data-mb inf": "--data-mb inf: .* at most",
    "--data-mb 1e-9": "--data-mb 1e-09: .*a byte or more", "--lr inf": "or less", "--weight-decay inf": "or less",
    f"--trace-steps {10**20}-{10**23}": "or a range", "--trace-steps ²": "or a range",
    "--trace-steps 101-102": "--steps 100 is the last"}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_cannot_be_is_refused_in_one_sentence_before_anything_starts(arguments: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr("course_lib.launch.client._server", lambda: pytest.fail("something was started"))
    with pytest.raises(SystemExit) as left:
        command.main(arguments.split())
    said = capsys.readouterr().err
    assert left.value.code == 2 and re.search(REFUSED[arguments], said) and said.count("\n") == 1, said


def test_under_torchrun_one_rank_speaks_and_wires_are_not_for_it(monkeypatch, capsys) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, said in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit):
            command.main(["--fabric", "1GbE"])
        assert capsys.readouterr().err.count("without torchrun") == said


def test_options_say_what_an_update_holds() -> None:
    laid = Options(batch=2, global_batch=24, tp=2).laid_out(6)
    assert (laid.dp, laid.micro_steps, laid.global_batch) == (3, 4, 24)
    assert Options(batch=2, micro_steps=5).laid_out(3).global_batch == 30
    assert list(Options(trace_steps="3-5").traced) == [3, 4, 5] and list(Options(trace_steps="7").traced) == [7]


def test_slurm_script_is_a_script(capsys) -> None:
    assert command.main(["--slurm"]) == 0
    text = capsys.readouterr().out
    assert "-m course_lib.train" in text and "--max-restarts" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def odd_one_out() -> str:
    import torch.distributed as dist

    def do() -> int:
        if dist.get_rank() == 1:
            raise OSError("the disk is full")
        return 7

    with pytest.raises(JobError) as failed:
        together(Control(dist.group.WORLD), "a test", do)
    return str(failed.value)


def test_what_fails_on_one_rank_fails_on_all_with_its_name() -> None:
    assert run(odd_one_out, ranks=2, fabric="loopback") == ["rank 1: the disk is full"] * 2


def test_a_folder_that_cannot_be_written_is_one_sentence_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RankFailed) as failed:
        run(several, [options(tmp_path)], ranks=2, fabric="loopback")
    assert isinstance(failed.value.__cause__, JobError)
    assert re.fullmatch("rank 0: .*Is a directory.*metrics.jsonl'", str(failed.value.__cause__))


def test_seeds_and_sizes_at_their_limits_give_batches(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(bytes(range(100)))
    for seed in (-MOST, MOST):
        one = options(tmp_path, seed=seed, data=data, data_mb=MOST / 2**20).laid_out(1)
        assert len(Batches(one, torch.device("cpu")).window(10**6, 0)) == one.micro_steps


def refused_beside_another() -> str:
    lock.PATIENCE_S = 0.3
    with pytest.raises(JobError) as refused:
        train(options(Path("shared")))
    return str(refused.value)


def test_a_second_run_in_a_folder_is_refused_and_leaves_the_first_ones_files(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = Path("shared")
    out.mkdir()
    (out / "metrics.jsonl").write_text("mine")
    with lock.take(out):
        said = run(refused_beside_another, ranks=2, fabric="loopback")
    assert said == [f"rank 0: another run (process {os.getpid()} on {socket.gethostname()}) writes to shared; wait for "
                    "its end, or give another --out"] * 2
    assert (out / "metrics.jsonl").read_text() == "mine" and sorted(p.name for p in out.iterdir()) == [
        ".lock", "metrics.jsonl"]


def test_a_run_waits_for_the_one_that_is_being_killed(tmp_path: Path) -> None:
    """torchrun starts ranks again while old ones may still be there."""
    held, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        with lock.take(tmp_path):
            os.write(told, b"x")
            time.sleep(60)
        os._exit(0)
    os.read(held, 1)
    timer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
    begin = time.monotonic()
    timer.start()
    with lock.take(tmp_path):
        assert 0.4 < time.monotonic() - begin < lock.PATIENCE_S
    os.waitpid(pid, 0)
    with lock.take(tmp_path):
        pass


def test_a_file_system_without_locks_is_a_warning(tmp_path: Path, monkeypatch, capsys) -> None:
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", none)
    lock.take(tmp_path).close()
    said = capsys.readouterr().err
    assert str(tmp_path) in said and "No locks available" in said and said.count("\n") == 1


def ends_of(runs: list[Options]) -> list[str]:
    said = []
    for one in runs:
        with pytest.raises(Diverged) as ended:
            train(one)
        said.append(str(ended.value))
    return said


HUGE = {"optimizer": "sgd", "lr": 1e30, "warmup": 0, "max_norm": 0.0, "checkpoint_every": 1, "steps": 9}
WILD = {"plain": {}, "onebit": {"compress": "onebit"}, "topk": {"compress": "topk"}, "fp16": {"compress": "fp16"},
        "powersgd": {"compress": "powersgd"}, "zero2": {"strategy": "zero2"}, "pp": {"pp": 2},
        "local-sgd": {"strategy": "local-sgd", "local_steps": 4}}


def test_a_run_that_diverges_ends_says_where_and_keeps_its_checkpoint(tmp_path: Path) -> None:
    made = {name: options(tmp_path / name, **HUGE, **how) for name, how in WILD.items()}
    for said in run(ends_of, list(made.values()), ranks=2, fabric="loopback"):
        for one, sentence in zip(made.values(), said):
            lines = [json.loads(line, parse_constant=pytest.fail)
                     for line in (one.out / "metrics.jsonl").read_text().splitlines()]
            last = lines[-1]
            assert 2 <= last["step"] < one.steps and None in (last["loss"], last["grad_norm"])
            assert None not in [line[key] for line in lines[:-1] for key in ("loss", "grad_norm")]
            assert re.match(rf"update {last['step']}: the .* is not finite.*step-{last['step'] - 1:08d} is kept.* --lr",
                            sentence) and "\n" not in sentence
            assert checkpoint.steps(one.out)[-1] == last["step"] - 1 and not (one.out / "model.pt").exists()


def test_parameters_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    wild = HUGE | {"lr": 1e37, "weight_decay": 1e10, "steps": 1}
    made = [options(tmp_path / name, **wild, **WILD[name]) for name in ("plain", "zero2")]
    (said,) = run(ends_of, made, ranks=1, fabric="loopback")
    for one, sentence in zip(made, said):
        assert sentence.startswith("update 1: a parameter is not finite") and "no checkpoint yet" in sentence
        assert checkpoint.steps(one.out) == [] and not (one.out / "model.pt").exists()


def test_a_run_that_diverged_is_one_sentence_and_exit_code_1(monkeypatch, capsys) -> None:
    def fails(*_, **__):
        raise RankFailed(1, "a traceback", None) from Diverged("update 7: the loss is not finite")

    monkeypatch.setattr(command, "run", fails)
    assert command.main([]) == 1
    assert capsys.readouterr().err == "course_lib.train: update 7: the loss is not finite.\n"


def test_an_interrupt_says_where_the_run_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "course_lib.train", *SMALL, "--steps", "100000", "--ranks", "1", "--fabric",
             "loopback", "--out", str(out)], stdout=subprocess.DEVNULL, stderr=said, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's `&` has it ignored
    try:
        until(lambda: checkpoint.steps(out))
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(30) == 130
    finally:
        process.poll() is None and os.killpg(process.pid, signal.SIGKILL)
    step, saved = rows(out / "metrics.jsonl")[-1]["step"], checkpoint.steps(out)[-1]
    assert (tmp_path / "said").read_text() == (f"course_lib.train: interrupted at step {step}; run the same command "
                                               f"again to go on from step {saved}.\n")


def test_an_interrupt_before_the_first_checkpoint_says_so(tmp_path: Path) -> None:
    assert interrupted(tmp_path / "none") == ("interrupted at step 0; run the same command again to start anew, as "
                                              "there is no checkpoint yet")


STEPS, EVERY = 40, 10
SMALL = ("--layers 1 --heads 2 --width 16 --length 16 --batch 2 --micro-steps 2 --data-mb 0.02 --strategy zero2 "
         f"--steps {STEPS} --checkpoint-every {EVERY} --trace-steps 2-3").split()


def worker_of(agent: subprocess.Popen) -> int:
    """The one rank that a torchrun has started."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    return next(int(pid) for pid in children if b"course_lib.train" in Path(f"/proc/{pid}/cmdline").read_bytes())


def until(what, limit_s: float = 100.0):
    """The first true answer."""
    end = time.monotonic() + limit_s
    while not (found := what()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the rank to kill in /proc")
def test_two_nodes_under_torchrun_go_on_after_a_kill_as_if_nothing_had_been(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out, metrics = tmp_path / "killed", tmp_path / "killed" / "metrics.jsonl"
    nodes = [subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3",
         "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf=is_host={int(n == 0)}",
         "--local-addr=127.0.0.1", "-m", "course_lib.train", *SMALL, "--out", str(out)],
        stdout=(tmp_path / f"node{n}").open("w"), stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"})  # as `run` gives its ranks: bits depend on the number of threads
        for n in range(2)]
    try:
        until(lambda: metrics.exists() and len(rows(metrics)) > EVERY + 2)
        os.kill(worker_of(nodes[1]), signal.SIGKILL)
        codes = [node.wait(120) for node in nodes]
    finally:
        for node in nodes:
            node.poll() is None and os.killpg(node.pid, signal.SIGKILL)
    said = [(tmp_path / f"node{n}").read_text() for n in range(2)]
    assert codes == [0, 0], said
    assert "exitcode: -9" in said[1] and re.search(rf"goes on after update [1-{STEPS // EVERY - 1}]0", said[0]), said
    assert [row["step"] for row in rows(metrics)] == list(range(1, STEPS + 1))

    whole = Options(**{key: value for key, value in vars(command.parser().parse_args(
        [*SMALL, "--out", str(tmp_path / "whole")])).items() if key in Options.__dataclass_fields__})
    run(several, [whole], ranks=2, fabric="loopback")
    for inside in ("model.pt", f"checkpoints/step-{STEPS:08d}"):
        same = same_bits(out / inside, whole.out / inside)
        assert len(same) > 20 and [name for name, equal in same.items() if not equal] == []

    from course_lib.trace.reader import load
    trace = load(whole.out / "trace")
    assert [r.rank for r in trace.ranks] == [0, 1] and list(trace.timeline.steps) == [2, 3]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the rank in /proc")
def test_a_torchrun_that_is_killed_takes_its_ranks_with_it(tmp_path: Path) -> None:
    with (tmp_path / "said").open("w") as said:
        agent = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "-m", "course_lib.train", *SMALL,
             "--steps", "100000", "--out", str(tmp_path / "out")],
            stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        until(lambda: (tmp_path / "out" / "metrics.jsonl").exists())
        rank = worker_of(agent)
        agent.kill()
        agent.wait(10)
        until(lambda: not Path(f"/proc/{rank}/cmdline").exists() or not Path(f"/proc/{rank}/cmdline").read_bytes(), 10)
    finally:
        agent.poll() is None and os.killpg(agent.pid, signal.SIGKILL)
