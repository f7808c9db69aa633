"""Where traces lie: a .json, a .json.gz, a .zip of them, or a folder."""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from course_lib.trace.note import Note, TraceError

_GZIP, _ZIP = b"\x1f\x8b", b"PK\x03\x04"
ENDINGS = (".json", ".json.gz", ".zip")


@dataclass(frozen=True)
class Source:
    """One trace as bytes. `name` is the path as people gave it, with the member's name for one inside a .zip."""

    name: str
    raw: bytes
    notes: tuple[Note, ...] = ()
    fault: str = ""
    """Why it could not be unpacked, where it could not; `raw` is empty then."""


def sources(*paths: str | Path) -> Iterator[Source]:
    """Every trace file of these paths, folders in natural order of the names (rank 2 before rank 10).

    A path that is given twice counts once. Raises `TraceError` for a path that does not exist, has another ending or
    holds no trace file.
    """
    for path in dict.fromkeys(map(Path, paths)):
        if path.is_dir():
            inside = sorted((p for p in path.rglob("*") if p.is_file() and _ending(p.name)),
                            key=lambda p: natural(str(p)))
            if not inside:
                raise TraceError(f"{path} holds no {', '.join(ENDINGS)}: give the folder the profiler wrote to")
            for p in inside:
                yield from _file(p)
        elif not path.exists():
            raise TraceError(f"{path} does not exist")
        else:
            yield from _file(path)


def natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key in which numbers count as numbers."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def _ending(name: str) -> bool:
    return name.lower().endswith(ENDINGS)


def _is_json(raw: bytes) -> bool:
    """Profilers also write without an ending; the content decides then."""
    return raw[:2] == _GZIP or raw[:512].lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[")


def _file(path: Path) -> Iterator[Source]:
    raw = path.read_bytes()  # once: a pipe can only be read once
    if not _ending(path.name) and not _is_json(raw):
        raise TraceError(f"{path} is no trace file: a Chrome trace ends in {', '.join(ENDINGS)}")
    if raw[:4] != _ZIP:
        yield _unpacked(str(path), raw)
        return
    try:
        yield from _members(path, raw)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        # RuntimeError: encrypted, or compressed in a way that this Python does not know.
        yield Source(str(path), b"", fault=f"cannot be unpacked: {error}")


def _members(path: Path, raw: bytes) -> Iterator[Source]:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        names = sorted((n for n in archive.namelist() if n.lower().endswith(ENDINGS[:2]) and "__MACOSX" not in n),
                       key=natural)
        if not names:
            raise TraceError(f"{path} holds no .json or .json.gz")
        for name in names:
            yield _unpacked(f"{path}!{name}", archive.read(name))


def _unpacked(name: str, raw: bytes) -> Source:
    kept, rest = [], raw
    while rest[:2] == _GZIP:
        member = zlib.decompressobj(wbits=31)
        try:
            kept.append(member.decompress(rest))
        except zlib.error as error:
            return Source(name, b"", fault=f"cannot be unpacked: {error}")
        if not member.eof:
            # A job that was killed leaves a cut gzip file; what was written before the cut is whole.
            if not any(kept):
                return Source(name, b"", fault="cannot be unpacked: the gzip file is cut in its first bytes")
            return Source(name, b"".join(kept), (Note("cut-gzip", "the gzip file is cut; its beginning was read"),))
        rest = member.unused_data
    return Source(name, b"".join(kept) if kept else raw)
