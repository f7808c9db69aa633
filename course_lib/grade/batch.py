"""Grading a folder: who handed in what, a few at a time, on from where the journal ends."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import nbformat

from course_lib.grade import records, sandbox
from course_lib.grade.judge import unjudged
from course_lib.grade.outcome import NEEDS_A_PERSON, Judgement
from course_lib.grade.template import Template

WORKER_SECONDS = 1200.0
ALL_GRADED, A_PERSON, USAGE, ENVIRONMENT, GRADER_BUG = 0, 1, 2, 3, 4


@dataclass(frozen=True)
class Handed:
    """A submission: whose, and in which file. No file: an empty folder was handed in."""

    id: str
    file: Path | None


def find_root(start: Path | None = None) -> Path:
    """The course's folder, here or above, or else where this library lies: it holds solutions/ or labs/.

    Raises `FileNotFoundError`.
    """
    start = (start or Path.cwd()).resolve()
    package = Path(__file__).resolve().parents[2]
    for folder in (start, *start.parents, package):
        if (folder / "solutions").is_dir() or ((folder / "labs").is_dir() and (folder / "course_lib").is_dir()):
            return folder
    raise FileNotFoundError(f"there is no course in {start} or above it: neither solutions/ nor labs/")


def collect(place: Path, template: Template) -> list[Handed]:
    """The submissions in a folder, in order: each file, and each folder with a notebook in it. A file is itself one.

    Raises `FileNotFoundError`.
    """
    if place.is_file():
        return [Handed(_identity(place.stem), place)]
    if not place.is_dir():
        raise FileNotFoundError(f"there is no {place}")
    found: dict[str, Handed] = {}
    for entry in sorted(place.iterdir(), key=lambda path: path.name):
        if entry.name.startswith((".", "__")):
            continue
        name = _identity(entry.stem if entry.is_file() else entry.name)
        while name in found:
            name += "_"
        found[name] = Handed(name, entry if entry.is_file() else _notebook_of(entry, template))
    return list(found.values())


def grade(lab: str, place: Path, out: Path | None, *, root: Path, jobs: int = 1, only: Sequence[str] = (),
          regrade: bool = False, seed: int | None = None, notebook: bool = True,
          say: Callable[[str], object] = print) -> list[Judgement]:  # fmt: skip
    """Judge every submission in `place`, and write the records to `out`. Returns the judgements, in order.

    What the journal in `out` has, for the same submission, template and grader, is not judged again unless
    `regrade`. `seed` draws the same inputs for everybody. Raises `FileNotFoundError`, and `ValueError` for an id
    in `only` that nobody has.
    """
    template = Template.load(lab, root)
    handed = collect(place, template)
    if unknown := set(only) - {each.id for each in handed}:
        raise ValueError(f"nobody is called {', '.join(sorted(unknown))}; there are {', '.join(h.id for h in handed)}")
    handed = [each for each in handed if not only or each.id in only]
    if sandbox.level() == sandbox.WEAK:
        say("no sandbox can be built here; submissions run with your own rights (isolation: weak)")
    text = nbformat.writes(template.notebook, version=4)
    keys = {each.id: records.key_of(each.file.read_bytes() if each.file else b"", text) for each in handed}
    if out:
        out.mkdir(parents=True, exist_ok=True)
    journal = records.Journal(out / "journal.jsonl") if out else None
    known = journal.read() if journal and not regrade else {}
    done = {each.id: known[each.id, keys[each.id]] for each in handed if (each.id, keys[each.id]) in known}
    done = {name: judgement for name, judgement in done.items() if judgement.status != "grader_error"}
    lock, running = threading.Lock(), threading.Event()

    def one(each: Handed) -> None:
        if running.is_set():
            return
        judgement = _in_a_process(each, template, root, out, folder, seed, notebook)
        with lock:
            done[each.id] = judgement
            if journal:
                journal.append(keys[each.id], judgement)
            say(f"[{len(done)}/{len(handed)}] {line_of(judgement)}")

    for each in handed:
        if each.id in done:
            say(f"{each.id}: in the journal already ({done[each.id].status})")
    with tempfile.TemporaryDirectory(prefix="course-grade-") as folder, ThreadPoolExecutor(max(1, jobs)) as pool:
        try:
            waiting = [pool.submit(one, each) for each in handed if each.id not in done]
            for future in waiting:
                future.result()
        except BaseException:
            running.set()
            for process in list(_processes):
                process.kill()
            raise
    judgements = [done[each.id] for each in handed]
    if out and not only:
        records.write_grades(out / "grades.csv", judgements)
    elif out:
        everybody = {name: judgement for (name, _), judgement in records.Journal(out / "journal.jsonl").read().items()}
        records.write_grades(out / "grades.csv", [everybody[name] for name in sorted(everybody)])
    return judgements


def exit_code(judgements: Sequence[Judgement]) -> int:
    """0 all graded, 1 a person is needed, 4 the grader failed."""
    statuses = {judgement.status for judgement in judgements}
    if "grader_error" in statuses:
        return GRADER_BUG
    return A_PERSON if statuses & NEEDS_A_PERSON else ALL_GRADED


def line_of(judgement: Judgement) -> str:
    """One line for the log of a batch."""
    points = "–" if judgement.points is None else f"{judgement.points:g}"
    return f"{judgement.id}: {judgement.status}, {points} of {judgement.max_points:g} points, {judgement.seconds:.0f} s"


def table(judgements: Sequence[Judgement]) -> str:
    """The final table: who, status, points, overlap, F, seconds."""
    rows = [("id", "status", "points", "overlap", "F", "seconds")]
    for j in judgements:
        points = "" if j.points is None else f"{j.points:g}/{j.max_points:g}"
        share = "" if j.overlap is None else f"{j.overlap:.0%}"
        rows.append((j.id, j.status, points, share, "" if j.fair_score is None else f"{j.fair_score:.2f}",
                     f"{j.seconds:.0f}"))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


_processes: set[subprocess.Popen] = set()


def _in_a_process(each: Handed, template: Template, root: Path, out: Path | None, folder: str, seed: int | None,
                  notebook: bool) -> Judgement:  # fmt: skip
    """Judge one submission in a worker. A worker that fails is the grader's fault, not the submission's."""
    answer = Path(folder, f"{secrets.token_hex(8)}.json")
    job = {"id": each.id, "file": str(each.file.resolve()) if each.file else "", "lab": template.lab,
           "root": str(root), "seed": secrets.randbelow(2**31) if seed is None else seed,
           "out": str(out.resolve()) if out else "", "answer": str(answer), "notebook": notebook,
           "lock": str(Path(folder, "quiet")), "parent": os.getpid()}  # fmt: skip
    command = [sys.executable, "-c", "import json, sys; from course_lib.grade.worker import main; "
               "main(json.loads(sys.argv[1]))", json.dumps(job)]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               start_new_session=True, env=environment)  # fmt: skip
    _processes.add(process)
    try:
        _, said = process.communicate(timeout=WORKER_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        _, said = process.communicate()
    finally:
        _processes.discard(process)
    try:
        return Judgement.from_dict(json.loads(answer.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        parts = tuple(unjudged(template, "grader_error", None))
        last = said.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        return Judgement(each.id, template.lab, parts, "grader_error", f"The grader failed: {last[0]}"[:500],
                         seconds=time.monotonic() - begin)  # fmt: skip


def _notebook_of(folder: Path, template: Template) -> Path | None:
    """The notebook of a learner's folder: the one named like the lab, or the first; else the first file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    notebooks = [path for path in files if path.suffix == ".ipynb" and ".ipynb_checkpoints" not in path.parts]
    named = [path for path in notebooks if path.stem == template.name or path.stem.startswith(template.lab)]
    return next(iter(named or notebooks or files), None)


def _identity(name: str) -> str:
    """A name that can be a file's on every system, and stays recognisable."""
    return re.sub(r"[^\w.@+-]", "_", name)[:100] or "_"
