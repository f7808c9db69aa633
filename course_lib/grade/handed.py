"""Who handed in what: the submissions that lie in a folder, and what can be read of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from course_lib.grade.template import LARGEST_BYTES, Template

NOT_HANDED_IN = {"__MACOSX", "__pycache__", ".ipynb_checkpoints"}
"""Folders that archives, Python and Jupyter make by themselves."""
LONGEST_ID = 100
LINK = "it is a link, and links are not followed: hand in the file itself"


@dataclass(frozen=True)
class Handed:
    """A submission: whose, and in which file. Without a file there is a `fault`, which says why. `flags` are remarks
    about how the file was found."""

    id: str
    file: Path | None
    fault: str = ""
    flags: tuple[str, ...] = ()

    def read(self) -> tuple[Handed, bytes]:
        """What is in the file. Where it cannot be read, this submission with the fault, and nothing."""
        if self.file is None:
            return self, b""
        try:
            size = self.file.stat().st_size
            if size > LARGEST_BYTES:
                said = f"the file has {size / 2**20:.0f} MB; more than {LARGEST_BYTES >> 20} MB are not read"
                return replace(self, file=None, fault=said), b""
            with open(self.file, "rb") as file:
                return self, file.read(LARGEST_BYTES + 1)
        except OSError as error:
            return replace(self, file=None, fault=f"it cannot be read: {error.strerror}"), b""


def collect(place: Path, template: Template, out: Path | None = None) -> list[Handed]:
    """The submissions in a folder, in order: each file, and each folder with a notebook in it. A file is itself one.

    The folder of the records, `out`, is none, wherever it lies. Links are not followed: they could show one learner's
    file, or the solution, as another's. Raises `FileNotFoundError`, and `ValueError` if the records would lie among
    the submissions.
    """
    if place.is_file():
        return [Handed(_identity(place.stem), place)]
    if not place.is_dir():
        raise FileNotFoundError(f"there is no {place}")
    place, records = place.resolve(), out.resolve() if out else None
    if records == place:
        raise ValueError(f"{out} holds the submissions: give --out a folder of its own")
    found: dict[str, Handed] = {}
    for entry in sorted(place.iterdir(), key=lambda path: path.name):
        if entry.name.startswith(".") or entry.name in NOT_HANDED_IN:
            continue
        if records is not None and records.is_relative_to(entry):
            continue
        one = _one(entry, template)
        name = one.id
        while name in found:
            name += "_"
        found[name] = replace(one, id=name)
    return list(found.values())


def _one(entry: Path, template: Template) -> Handed:
    if entry.is_symlink():
        return Handed(_identity(entry.stem), None, LINK)
    if entry.is_dir():
        return _of_folder(entry, template)
    if not entry.is_file():
        return Handed(_identity(entry.stem), None, "it is no file but a pipe or a device")
    return Handed(_identity(entry.stem), entry)


def _of_folder(folder: Path, template: Template) -> Handed:
    """The notebook of a learner's folder: the one called like the lab, or like its number, or the first; else the
    first file."""
    name, faults = _identity(folder.name), []
    try:
        files = [path for path in _files(folder, faults) if not path.name.startswith(".")]
    except RecursionError:
        return Handed(name, None, "its folders are nested too deeply")
    if not files:
        return Handed(name, None, f"it cannot be read: {faults[0]}" if faults else "the folder has no file in it")
    files.sort(key=lambda path: (len(path.parts), path))
    notebooks = [path for path in files if path.suffix == ".ipynb"]
    exact = [path for path in notebooks if path.stem == template.name]
    named = [path for path in notebooks if path.stem.startswith(template.lab)]
    chosen = next(iter(exact or named or notebooks or files))
    if chosen.is_symlink():
        return Handed(name, None, LINK)
    several = len(named or notebooks)
    flag = f"{several} notebooks were handed in; {chosen.relative_to(folder)} was judged"
    return Handed(name, chosen, flags=(flag,) if several > 1 else ())


def _files(folder: Path, faults: list[str]) -> Iterator[Path]:
    """Every file below a folder, links to files included. Why a folder could not be read goes to `faults`."""
    for here, folders, names in os.walk(folder, onerror=lambda error: faults.append(str(error.strerror))):
        folders[:] = [each for each in folders if each not in NOT_HANDED_IN]
        for path in (Path(here, each) for each in names):
            try:
                if path.is_symlink() or path.is_file():
                    yield path
            except OSError as error:  # a folder whose names can be listed, and nothing more
                faults.append(str(error.strerror))


def _identity(name: str) -> str:
    """A name that can be a file's on every system, and stays recognisable."""
    plain = re.sub(r"[^\w.@+-]", "_", name).encode()[:LONGEST_ID]
    return plain.decode(errors="ignore") or "_"
