"""Checkpoints on disk: a folder that is there as a whole, or not at all.

Ranks write into a folder whose name no reader looks for, every file is on the disk before the folder gets its name,
and a folder loses its name before it is deleted. So whenever a process is killed, what has a name is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from course_lib.job.together import JobError

FORMAT = "course_lib.train checkpoint 1"
MANIFEST = "manifest.json"
_KEYS = {"identity": dict, "ranks": int, "files": dict}
"""What every manifest has."""
_NAME = re.compile(r"step-(\d{8,})")


def folder_of(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:08d}"


def steps(out: Path) -> list[int]:
    """Those of the checkpoints that are there, in ascending order."""
    root = out / "checkpoints"
    found = (_NAME.fullmatch(path.name) for path in root.iterdir() if path.is_dir()) if root.is_dir() else ()
    return sorted(int(match[1]) for match in found if match)


def begin(out: Path, step: int) -> Path:
    """A new folder to write into, on one rank. What a killed run left half done is removed."""
    root = out / "checkpoints"
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(".*-step-*"):
        shutil.rmtree(left)
    folder = _unnamed(out, step)
    folder.mkdir()
    return folder


def write(out: Path, step: int, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """One file of the checkpoint, on the disk on return; on any rank, after `begin`. Gives its line of the manifest."""
    path = _unnamed(out, step) / name
    if not path.parent.is_dir():
        raise JobError(f"{path.parent} is not there: --out must be a folder that all nodes share")
    written = _save(path, state)
    return {"bytes": written.bytes, "sha256": written.sha256.hexdigest()}


def publish(out: Path, step: int, manifest: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]],
            keep: int) -> None:
    """Give the folder its name, when all ranks have written; on the rank that called `begin`. Of the checkpoints up to
    this one the newest `keep` stay."""
    folder = _unnamed(out, step)
    for name, entry in files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != entry["bytes"]:
            raise JobError(f"{folder / name}, which another rank wrote, is not to be seen from rank 0: --out must be a "
                           "folder that all nodes share")
    with (folder / MANIFEST).open("wb") as file:
        file.write(json.dumps({"format": FORMAT, "step": step, **manifest, "files": files}, indent=1).encode())
        _to_disk(file)
    _folder_to_disk(folder)
    os.rename(folder, folder_of(out, step))
    _folder_to_disk(folder.parent)
    for old in [s for s in steps(out) if s <= step][:-keep]:
        unnamed = folder.parent / f".old-{folder_of(out, old).name}"
        os.rename(folder_of(out, old), unnamed)
        shutil.rmtree(unnamed)


def manifest_of(folder: Path) -> dict[str, Any]:
    """Raises `JobError` for a folder that is no checkpoint of ours."""
    try:
        found = json.loads((folder / MANIFEST).read_bytes())
        if found["format"] == FORMAT and folder.name == folder_of(folder, found["step"]).name:
            if wrong := [key for key, kind in _KEYS.items() if not isinstance(found.get(key), kind)]:
                raise ValueError(f"it gives no {wrong[0]!r}")
            return found
        reason = f"its {MANIFEST} says {found['format']!r}, step {found['step']}"
    except FileNotFoundError:
        reason = f"it has no {MANIFEST}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"its {MANIFEST} cannot be read: {str(error) or type(error).__name__}"
    raise JobError(f"{folder} is no checkpoint of this command ({reason}); {_instead(folder)}")


def read(folder: Path, name: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The content of one file, in the host's memory: a GPU takes its part of a sharded model from there and need not
    hold the whole, and AdamW's count of steps, for which the host would wait on a GPU, stays where it was. Raises
    `JobError` for a file that is not as it was written. Only tensors and plain values are read: a foreign file runs no
    code."""
    path, entry = folder / name, manifest["files"].get(name)
    try:
        if entry is None:
            raise JobError("the manifest does not list it")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                raise JobError("its content is not what was written")
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = "it is missing" if isinstance(error, FileNotFoundError) else str(error).splitlines()[0]
        raise JobError(f"{path} cannot be used: {reason}; {_instead(folder)}") from error


def write_file(path: Path, state: Mapping[str, Any]) -> None:
    """One file by itself, whole or not at all."""
    unnamed = path.with_name(f".{path.name}")
    _save(unnamed, state)
    os.rename(unnamed, path)
    _folder_to_disk(path.parent)


def _save(path: Path, state: Mapping[str, Any]) -> _Hashed:
    """On the disk on return. Raises `OSError` with the path where it could not be written."""
    try:
        with path.open("wb") as file:
            hashed = _Hashed(file)
            try:
                torch.save(dict(state), hashed)
            except RuntimeError:  # torch complains about its archive, and not about what the disk said
                if hashed.failed is None:
                    raise
                raise hashed.failed from None
            _to_disk(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return hashed


class _Hashed:
    """A file that is written once, from its beginning to its end, its checksum, and why it could not be written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.sha256, self.bytes = file, hashlib.sha256(), 0
        self.failed: OSError | None = None

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        self.bytes += memoryview(data).nbytes
        try:
            return self._file.write(data)
        except OSError as error:
            self.failed = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _unnamed(out: Path, step: int) -> Path:
    return out / "checkpoints" / f".new-{folder_of(out, step).name}"


def _instead(folder: Path) -> str:
    return f"delete {folder} to go on from the one before it, or start anew with another --out"


def _to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _folder_to_disk(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
