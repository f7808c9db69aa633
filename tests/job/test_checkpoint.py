"""Checkpoints and metrics on disk: whole or not there, whoever is killed when; and what is said about others."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
from itertools import count
from pathlib import Path

import pytest
import torch

from course_lib.job import checkpoint
from course_lib.job.metrics import Metrics, rows
from course_lib.job.together import JobError

NAMES = ("rank-0.pt", "stage-0-shard-0.pt")


def save(out: Path, step: int, keep: int = 2) -> None:
    checkpoint.begin(out, step)
    files = {name: checkpoint.write(out, step, name, {"x": torch.full((1000,), float(step))}) for name in NAMES}
    checkpoint.publish(out, step, {"identity": {}, "ranks": 1}, files, keep)


def read(out: Path, step: int) -> set[float]:
    folder = checkpoint.folder_of(out, step)
    manifest = checkpoint.manifest_of(folder)
    return {float(v) for name in NAMES for v in checkpoint.read(folder, name, manifest)["x"]}


def killed_at(operation: int, out: Path) -> bool:
    """Save update 3 in a process that dies before the given operation on the disk. Did it die?"""
    pid = os.fork()
    if pid == 0:
        left = iter(range(operation, -1, -1))

        def dying(do):
            def instead(*args, **kwargs):
                if next(left) == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return do(*args, **kwargs)
            return instead

        in_os = ("fsync", "rename", "unlink", "rmdir", "mkdir")
        for module, name in (*((os, name) for name in in_os), (torch, "save")):
            setattr(module, name, dying(getattr(module, name)))
        try:
            save(out, 3)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_kill_before_any_operation_leaves_a_whole_newest_checkpoint(tmp_path: Path) -> None:
    start = tmp_path / "start"
    for step in (1, 2):
        save(start, step)
    newest = []
    for operation in count():
        out = tmp_path / str(operation)
        shutil.copytree(start, out)
        died = killed_at(operation, out)
        for step in checkpoint.steps(out)[-1:]:
            assert read(out, step) == {float(step)}, operation
            newest.append(step)
        save(out, 4)  # over whatever was left
        assert read(out, 4) == {4.0} and checkpoint.steps(out)[-1] == 4, operation
        assert not list((out / "checkpoints").glob(".*")), operation
        if not died:
            break
    assert len(newest) > 12 and set(newest) == {2, 3} and newest == sorted(newest)


def test_the_newest_stay(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        save(tmp_path, step, keep=3)
    assert checkpoint.steps(tmp_path) == [10, 15, 20]
    save(tmp_path, 12, keep=1)  # of a run that went on from 10, after the later ones were found damaged
    assert checkpoint.steps(tmp_path) == [12, 15, 20]


class Malice:
    def __reduce__(self):
        return os.mkdir, ("malice",)


def other_content(folder: Path) -> None:
    path = folder / NAMES[0]
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def code(folder: Path) -> None:
    """A file that would run something when it is unpickled, with a manifest that fits."""
    import hashlib
    raw = pickle.dumps(Malice())
    (folder / NAMES[0]).write_bytes(raw)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][NAMES[0]] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def spoilt(key: str, value):
    """The manifest with something else there, which null is too."""
    def change(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**manifest, key: value}))
    return change


DAMAGE = {"content": (other_content, "not what was written"),
          "missing": (lambda f: (f / NAMES[0]).unlink(), "missing"), "code": (code, "cannot be used"),
          "no manifest": (lambda f: (f / "manifest.json").unlink(), "has no manifest"),
          "cut manifest": (lambda f: os.truncate(f / "manifest.json", 20), "cannot be read"),
          "list": (lambda f: (f / "manifest.json").write_text("[]"), "cannot be read"),
          **{key: (spoilt(key, value), f"cannot be read: it gives no '{key}'")
             for key, value in (("identity", []), ("ranks", None), ("files", 3))},
          "no identity": (lambda f: (f / "manifest.json").write_text(json.dumps(
              {"format": checkpoint.FORMAT, "step": 1})), "cannot be read: it gives no 'identity'"),
          "foreign": (lambda f: (f / "manifest.json").write_text('{"format": "other", "step": 1}'), "says 'other'"),
          "renamed": (lambda f: f.rename(f.with_name("step-00000009")), "step 1")}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_damaged_or_foreign_is_refused_in_one_sentence(tmp_path: Path, monkeypatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path, 1)
    damage, words = DAMAGE[kind]
    damage(checkpoint.folder_of(tmp_path, 1))
    with pytest.raises(JobError) as refused:
        read(tmp_path, checkpoint.steps(tmp_path)[-1])
    said = str(refused.value)
    assert words in said and "step-0000000" in said and "another --out" in said and "\n" not in said
    assert not Path("malice").exists()


def test_a_folder_that_nodes_do_not_share_is_named(tmp_path: Path) -> None:
    checkpoint.begin(tmp_path / "here", 1)
    with pytest.raises(JobError, match="all nodes share"):
        checkpoint.write(tmp_path / "there", 1, NAMES[0], {})
    with pytest.raises(JobError, match=r"rank-0\.pt, which another rank wrote.*all nodes share"):
        checkpoint.publish(tmp_path / "here", 1, {}, {NAMES[0]: {"bytes": 1, "sha256": ""}}, 2)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no disk that is full")
@pytest.mark.parametrize("size", [1, 10**6])
def test_a_full_disk_is_one_sentence(tmp_path: Path, size: int) -> None:
    """However much of a file there was when it became full."""
    state, full = {"x": torch.ones(size)}, "No space left on device: '.*"
    (checkpoint.begin(tmp_path, 1) / NAMES[0]).symlink_to("/dev/full")
    with pytest.raises(OSError, match=full + NAMES[0]):
        checkpoint.write(tmp_path, 1, NAMES[0], state)
    (tmp_path / ".model.pt").symlink_to("/dev/full")
    with pytest.raises(OSError, match=full + "model.pt"):
        checkpoint.write_file(tmp_path / "model.pt", state)
    metrics = Metrics(tmp_path / "metrics.jsonl", 0)
    with (open("/dev/full", "wb", buffering=0) as metrics._file,
          pytest.raises(JobError, match=r"metrics\.jsonl cannot be written: No space left")):
        metrics.add({"step": 1, "loss": 1.0})


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl", 0)
    metrics.add({"step": 1, "loss": float("nan"), "grad_norm": float("-inf"), "lr": 1e-3, "exposed_ms": None})
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "loss": null, "grad_norm": null, "lr": 0.001, "exposed_ms": null}\n')


def test_lines_after_the_checkpoint_and_what_a_kill_left_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = Metrics(path, 0)
    for step in range(1, 6):
        first.add({"step": step, "loss": 1.0})
    first.close()
    with path.open("ab") as file:
        file.write(b'{"step": 6, "lo')
    assert [row["step"] for row in rows(path)] == [1, 2, 3, 4, 5]
    again = Metrics(path, 3)
    for step in (4, 5):
        again.add({"step": step, "loss": 2.0})
    again.sync()
    assert [(row["step"], row["loss"]) for row in rows(path)] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0)]
    assert path.read_bytes().count(b"\n") == 5
    Metrics(path, 0).close()
    assert path.read_bytes() == b""
