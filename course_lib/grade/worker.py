"""Run as a process of its own, once a submission: judge it and leave what is written for people.

A process each, because a check's time limits need a main thread, and because nothing that a submission brings
about may stop the batch.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import nbformat

from course_lib.grade import feedback, records
from course_lib.grade.judge import Judged, judge
from course_lib.grade.quiet import Quiet
from course_lib.grade.template import Template
from course_lib.launch.processes import die_with_parent


def main(job: dict) -> None:
    """Judge `job["file"]` and write the judgement, as JSON, to `job["answer"]`."""
    die_with_parent(job["parent"])
    template = Template.load(job["lab"], Path(job["root"]))
    data = Path(job["file"]).read_bytes() if job["file"] else b""
    quiet = Quiet(Path(job["lock"]))
    judged = judge(job["id"], data, template, job["seed"], notebook=job["notebook"], quiet=quiet, fault=job["fault"],
                   flags=tuple(job["flags"]))  # fmt: skip
    if job["out"]:
        _keep(judged, Path(job["out"]))
    records.replace_file(Path(job["answer"]), json.dumps(judged.judgement.as_dict()))
    if judged.trouble:
        sys.stderr.write(judged.trouble)
    sys.stdout.flush()
    os._exit(0)  # threads of a library must not hold the batch up


def _keep(judged: Judged, out: Path) -> None:
    """Feedback page, Gradescope's result, the executed notebook and the log."""
    name = judged.judgement.id
    records.replace_file(out / "feedback" / f"{name}.html", feedback.page(judged.judgement, _pictures(judged)))
    records.write_result(out / "results" / f"{name}.json", judged.judgement)
    trouble = judged.trouble
    if judged.notebook is not None:
        try:
            text = nbformat.writes(judged.notebook, version=4)
        except Exception as error:  # the notebook's own code can have written it
            trouble += f"The executed notebook cannot be written: {type(error).__name__}: {error}\n"[:2000]
        else:
            records.replace_file(out / "notebooks" / f"{name}.ipynb", text)
    if judged.log or trouble:
        log = judged.log.decode("utf-8", "replace") + trouble
        records.replace_file(out / "logs" / f"{name}.log", collapsed(log))


def collapsed(log: str) -> str:
    """What is left of each line when carriage returns have done their work, as on a terminal."""
    return "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in log.split("\n"))


def _pictures(judged: Judged) -> list[tuple[str, bytes]]:
    """The learner's own step, with the expected one as an outline on the same clock, then the expected one alone."""
    measured = judged.measurement
    if measured is None or measured.timeline is None:
        return []
    from course_lib import show

    limit = round(max(measured.seconds["given"], measured.seconds["comm"]) * 1e9)
    try:
        return [
            ("Your step, as your ranks recorded it", _png(show.figure(measured.timeline, limit_ns=limit))),
            ("The step to expect with these buckets", _png(show.figure(measured.expected, limit_ns=limit))),
        ]
    except (ValueError, OverflowError, MemoryError):
        return []


def _png(figure: object) -> bytes:
    import io

    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
