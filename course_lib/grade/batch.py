"""Grading a folder: who handed in what, a few at a time, on from where the journal ends."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat

from course_lib.grade import records, sandbox
from course_lib.grade.handed import Handed, collect
from course_lib.grade.judge import unjudged
from course_lib.grade.outcome import NEEDS_A_PERSON, Judgement
from course_lib.grade.template import Template

WORKER_SECONDS = 1200.0
ALL_GRADED, A_PERSON, USAGE, ENVIRONMENT, GRADER_BUG = 0, 1, 2, 3, 4


def find_root(start: Path | None = None) -> Path:
    """The course's folder: the one that this library lies in, or where it is installed without the course, the nearest
    one, from `start` up, that has solutions/ or labs/ beside a course_lib/.

    What lies where the command is given comes last, and a solutions/ alone is no course: submissions may lie there.
    Raises `FileNotFoundError`.
    """
    start = (start or Path.cwd()).resolve()
    for folder in (sandbox.PACKAGE.parent, start, *start.parents):
        if (folder / sandbox.PACKAGE.name).is_dir() and any((folder / n).is_dir() for n in ("solutions", "labs")):
            return folder
    raise FileNotFoundError(f"there is no course in {start} or above it: no labs/ beside a course_lib/")


def grade(lab: str, place: Path, out: Path | None, *, root: Path, jobs: int = 1, only: Sequence[str] = (),
          regrade: bool = False, seed: int | None = None, notebook: bool = True,
          say: Callable[[str], object] = print) -> list[Judgement]:  # fmt: skip
    """Judge every submission in `place`, and write the records to `out`. Returns the judgements, in order.

    What the journal in `out` has, for the same submission, template and grader, is not judged again unless
    `regrade`. `seed` draws the same inputs for everybody. Raises `FileNotFoundError`, and `ValueError` for an id
    in `only` that nobody has or if the records would lie among the submissions.
    """
    template = Template.load(lab, root)
    handed = collect(place, template, out)
    if unknown := set(only) - {each.id for each in handed}:
        raise ValueError(f"nobody is called {', '.join(sorted(unknown))}; there are {', '.join(h.id for h in handed)}")
    handed = [each for each in handed if not only or each.id in only]
    if sandbox.level() == sandbox.WEAK:
        say("no sandbox can be built here; submissions run with your own rights (isolation: weak)")
    text = nbformat.writes(template.notebook, version=4)
    keys = {}
    for index, each in enumerate(handed):
        handed[index], data = each.read()
        keys[each.id] = records.key_of(data or handed[index].fault.encode(), text)
    journal = records.Journal(out / "journal.jsonl") if out else None
    with journal.alone() if journal else contextlib.nullcontext():
        known = journal.read() if journal and not regrade else {}
        done = {each.id: known[each.id, keys[each.id]] for each in handed if (each.id, keys[each.id]) in known}
        done = {name: judgement for name, judgement in done.items() if judgement.status != "grader_error"}
        for each in handed:
            if each.id in done:
                say(f"{each.id}: in the journal already ({done[each.id].status})")

        def judged(judgement: Judgement) -> None:
            done[judgement.id] = judgement
            if journal:
                journal.append(keys[judgement.id], judgement)
            say(f"[{len(done)}/{len(handed)}] {line_of(judgement)}")

        left = [each for each in handed if each.id not in done]
        _judge_all(left, template, root, out, jobs=jobs, seed=seed, notebook=notebook, judged=judged)
        judgements = [done[each.id] for each in handed]
        if out and not only:
            records.write_grades(out / "grades.csv", judgements)
        elif out:
            everybody = {name: each for (name, _), each in journal.read().items() if each.lab == template.lab}
            records.write_grades(out / "grades.csv", [everybody[name] for name in sorted(everybody)])
    return judgements


def _judge_all(handed: Sequence[Handed], template: Template, root: Path, out: Path | None, *, jobs: int,
               seed: int | None, notebook: bool, judged: Callable[[Judgement], None]) -> None:  # fmt: skip
    """Call `judged` with each judgement, one at a time. An interrupt ends the workers; what they had not finished is
    not judged. All that workers and their sandboxes make lies in one folder, which is removed."""
    lock, stopping = threading.Lock(), threading.Event()

    def one(each: Handed) -> None:
        if stopping.is_set():
            return
        judgement = _in_a_process(each, template, root, out, folder, seed, notebook, stopping)
        with lock:
            if not (stopping.is_set() and judgement.status == "grader_error"):  # that is: unless it was ended
                judged(judgement)

    with sandbox.folder("course-grade-") as folder, ThreadPoolExecutor(max(1, jobs)) as pool:
        try:
            for future in [pool.submit(one, each) for each in handed]:
                future.result()
        except BaseException:
            stopping.set()
            for process in list(_processes):
                process.kill()
            raise


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


def _in_a_process(each: Handed, template: Template, root: Path, out: Path | None, folder: Path, seed: int | None,
                  notebook: bool, stopping: threading.Event) -> Judgement:  # fmt: skip
    """Judge one submission in a worker. A worker that fails is the grader's fault, not the submission's.

    It imports nothing from the folder it is started in (`-P`): that may be the one of the submissions, and a learner's
    `json.py` lie in it.
    """
    answer = Path(folder, f"{secrets.token_hex(8)}.json")
    job = {"id": each.id, "file": str(each.file.resolve()) if each.file else "", "fault": each.fault,
           "flags": list(each.flags), "lab": template.lab, "root": str(root),
           "seed": secrets.randbelow(2**31) if seed is None else seed,
           "out": str(out.resolve()) if out else "", "answer": str(answer), "notebook": notebook,
           "lock": str(Path(folder, "quiet")), "parent": os.getpid()}  # fmt: skip
    command = [sys.executable, "-P", "-c", "import json, sys; from course_lib.grade.worker import main; "
               "main(json.loads(sys.argv[1]))", json.dumps(job)]  # fmt: skip
    path = os.pathsep.join([*filter(None, sys.path), str(sandbox.PACKAGE.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    begin = time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               start_new_session=True, env=environment)  # fmt: skip
    _processes.add(process)
    try:
        if stopping.is_set():
            process.kill()
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
