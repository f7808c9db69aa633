"""The executed notebook: evidence for people, made by papermill in the sandbox. Points never come from here."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from course_lib.grade import sandbox
from course_lib.grade.template import Submission, Template, rebuilt

CELL_SECONDS, NOTEBOOK_SECONDS, GRACE_SECONDS = 60.0, 300.0, 30.0
OUTPUT_BYTES = 12 * 2**20
LARGEST_NOTEBOOK = 64 * 2**20
LOG_BYTES = 200_000
LEFT_BEHIND = ("report.json", "out.ipynb")
"""Files of the sandbox that are read when it has ended."""
CHECK = re.compile(r"^(lab\.)?check\(", re.MULTILINE)

_SENTENCES = {
    "timeout": "was still running when its time was over ({seconds:.0f} s)",
    "kernel_died": "ended the kernel (exit code {code})",
    "early_exit": "left the kernel by itself: sys.exit() ends the notebook, and no cell after it ran",
    "output_flood": "printed too much (more than {output} MB)",
    "out_of_memory": "asked for more memory than there is",
}


@dataclass(frozen=True)
class Run:
    """What came of running the notebook. `outcome` is `ok` also when a check failed; the sentence names the cell."""

    outcome: str
    sentence: str
    notebook: NotebookNode | None
    log: bytes
    facts: dict = field(default_factory=dict)


def run(template: Template, submission: Submission, failed: Collection[str]) -> Run:
    """Run the rebuilt notebook top to bottom. When exercises `failed`, what only demonstrates is left out.

    Raises `RuntimeError` if the engine did not start: that is no fault of the notebook.
    """
    notebook = rebuilt(template, submission)
    with sandbox.folder("course-run-") as work:
        nbformat.write(notebook, work / "in.ipynb")
        (work / "engine.json").write_text(json.dumps(_plan(notebook, work, bool(failed))), encoding="utf-8")
        for name in LEFT_BEHIND:
            (work / name).touch()
        limits = sandbox.Limits(file_mb=LARGEST_NOTEBOOK >> 20)
        argv = ["-c", "from course_lib.grade.engine_inside import main; main()", sandbox.path_of(work, "")]
        ended = sandbox.start(argv, work=work, limits=limits).wait(NOTEBOOK_SECONDS + GRACE_SECONDS)
        report, executed = _read(work)
    started = report and not (report.get("outcome") == "ok" and report.get("last") is None)
    if not started and not ended.why:
        raise RuntimeError(f"the notebook's run did not start: {ended.output[-2000:].decode(errors='replace')}")
    outcome = ended.why or report.get("outcome")
    if outcome != "ok" and outcome not in tuple(_SENTENCES):  # the notebook's code can write a report of its own
        outcome = "kernel_died"
    if any("MemoryError" in str(error) for error in report.get("errors", [])) and outcome == "ok":
        outcome = "out_of_memory"
    if executed is not None:
        _mark_what_did_not_run(executed)
    facts = {"notebook": "exercises only" if failed else "whole", "notebook_s": round(ended.seconds, 1)}
    return Run(outcome, _sentence(outcome, report, notebook), executed, ended.output[:LOG_BYTES], facts)


def _plan(notebook: NotebookNode, work: Path, only_exercises: bool) -> dict:
    exercises = [cell.id for cell in notebook.cells if "exercise" in cell.metadata]
    checks = [cell.id for cell in notebook.cells if cell.cell_type == "code" and CHECK.search(cell.source)]
    needed = ["parameters", "begin", "imports"]
    wanted = {*exercises, *checks, *needed}
    left_out = [cell.id for cell in notebook.cells if cell.id not in wanted] if only_exercises else []
    return {"cell_s": CELL_SECONDS, "notebook_s": NOTEBOOK_SECONDS, "output_bytes": OUTPUT_BYTES,
            "goes_on_after": [*exercises, *checks], "left_out": left_out, "parameters": {"quick": True},
            "folder": sandbox.path_of(work, "")}  # fmt: skip


def _read(work: Path) -> tuple[dict, NotebookNode | None]:
    """The report and the notebook that the sandbox left, if they can be read."""
    report, executed = {}, None
    for name in LEFT_BEHIND:
        path = work / name
        try:
            if path.is_symlink() or not path.is_file() or path.stat().st_size > LARGEST_NOTEBOOK:
                continue
            text = path.read_text(encoding="utf-8")
            if name == "out.ipynb":
                executed = nbformat.reads(text, as_version=4)
            else:
                report = json.loads(text)
        except Exception:  # whatever a submission can make of a file
            continue
    return report if isinstance(report, dict) else {}, executed


def _mark_what_did_not_run(notebook: NotebookNode) -> None:
    """Papermill calls cells completed that never ran; only an execution count says that a cell ran."""
    for cell in notebook.cells:
        if cell.cell_type == "code" and not cell.execution_count and "papermill" in cell.metadata:
            cell.metadata.papermill.status = "not run"


def _sentence(outcome: str, report: dict, notebook: NotebookNode) -> str:
    if outcome not in _SENTENCES:
        return ""
    last = report.get("last")
    cell = next((cell for cell in notebook.cells if cell.id == last), None)
    exercise = cell.metadata.get("exercise") if cell is not None else None
    where = f'The cell "{cell.id}"' if cell is not None else "The notebook"
    where += f" (exercise {exercise})" if exercise else ""
    said = _SENTENCES[outcome].format(seconds=CELL_SECONDS, code=report.get("code"), output=OUTPUT_BYTES >> 20)
    return f"{where} {said}."
