"""What a learner's folder remembers: `.course/progress.json` and `.course/predictions.json`.

Both lie next to the notebook and are replaced in one step, so a kernel that dies while writing loses
nothing. Where the folder cannot be written, the notebook goes on and remembers until its kernel ends.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Record = dict[str, dict]

_folder: Path | None = None
_in_memory: dict[str, Record] = {}


def folder() -> Path:
    """Where this learner's files are: `COURSE_DIR` if it is set, else `.course` in the notebook's folder.

    The notebook's folder is the working directory when this is first asked; a later `chdir` changes nothing.
    """
    global _folder
    if named := os.environ.get("COURSE_DIR"):
        return Path(named)
    if _folder is None:
        _folder = Path.cwd() / ".course"
    return _folder


def read(name: str) -> Record:
    """The records of the file `name`. A missing file has none; an unreadable one is put aside."""
    if name in _in_memory:
        return _in_memory[name]
    path = folder() / f"{name}.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and all(isinstance(record, dict) for record in found.values()):
            return found
    except OSError:
        return {}
    except ValueError:
        pass
    with suppress(OSError):
        os.replace(path, path.with_suffix(".unreadable"))
    return {}


@contextmanager
def update(name: str) -> Iterator[Record]:
    """The records of `name`, to be changed inside the block and written when it ends.

    >>> with update("progress") as records:
    ...     records.setdefault("4.1", {})["hints"] = 1
    """
    with _locked():
        records = read(name)
        yield records
        try:
            _write(folder() / f"{name}.json", records)
        except OSError:
            _in_memory[name] = records


def is_kept() -> bool:
    """False once something could not be written: it is then remembered only until the kernel ends."""
    return not _in_memory


def _write(path: Path, records: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(records, file, indent=1, sort_keys=True, ensure_ascii=False)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def _locked() -> Iterator[None]:
    """One writer at a time: two notebooks of one folder share their files. Best effort where locks are missing."""
    try:
        import fcntl

        folder().mkdir(parents=True, exist_ok=True)
        lock = open(folder() / ".lock", "w")  # noqa: SIM115 - closing it is what releases the lock
    except (ImportError, OSError):
        yield
        return
    with lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
