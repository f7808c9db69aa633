"""Where traces lie: a .json, a .json.gz, a .zip of them, or a folder."""

from __future__ import annotations

import gzip
import io
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from course_lib.trace.note import Note, TraceError

ENDINGS = (".json", ".json.gz", ".zip")


@dataclass(frozen=True)
class Source:
    """One trace as bytes. `name` is the path as people gave it, with the member's name for one inside a .zip."""

    name: str
    raw: bytes
    notes: tuple[Note, ...] = ()


def sources(*paths: str | Path) -> Iterator[Source]:
    """Every trace file of these paths, folders in natural order of the names (rank 2 before rank 10).

    Raises `TraceError` for a path that does not exist, has another ending or holds no trace file.
    """
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted((p for p in path.rglob("*") if p.is_file() and _ending(p.name)),
                            key=lambda p: natural(str(p)))
            if not inside:
                raise TraceError(f"{path} holds no {', '.join(ENDINGS)}: give the folder the profiler wrote to")
            for p in inside:
                yield from _file(p)
        elif not path.exists():
            raise TraceError(f"{path} does not exist")
        elif not _ending(path.name) and not _is_json(path):
            raise TraceError(f"{path} is no trace file: a Chrome trace ends in {', '.join(ENDINGS)}")
        else:
            yield from _file(path)


def natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key in which numbers count as numbers."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def _ending(name: str) -> bool:
    return name.lower().endswith(ENDINGS)


def _is_json(path: Path) -> bool:
    """Profilers also write without an ending; the content decides then."""
    with path.open("rb") as file:
        head = file.read(512)
    return head[:2] == b"\x1f\x8b" or head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[")


def _file(path: Path) -> Iterator[Source]:
    raw = path.read_bytes()
    if not zipfile.is_zipfile(io.BytesIO(raw)):
        yield _unpacked(str(path), raw)
        return
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        names = sorted((n for n in archive.namelist() if n.lower().endswith(ENDINGS[:2]) and "__MACOSX" not in n),
                       key=natural)
        if not names:
            raise TraceError(f"{path} holds no .json or .json.gz")
        for name in names:
            yield _unpacked(f"{path}!{name}", archive.read(name))


def _unpacked(name: str, raw: bytes) -> Source:
    if raw[:2] != b"\x1f\x8b":
        return Source(name, raw)
    try:
        return Source(name, gzip.decompress(raw))
    except (EOFError, OSError, zlib.error) as error:
        # A job that was killed leaves a cut gzip file; what was written before the cut is whole.
        begun = zlib.decompressobj(wbits=31)
        try:
            kept = begun.decompress(raw)
        except zlib.error:
            kept = b""
        if not kept:
            raise TraceError(f"{name} cannot be unpacked: {error}") from error
        return Source(name, kept, (Note("cut-gzip", "the gzip file is cut; its beginning was read"),))
