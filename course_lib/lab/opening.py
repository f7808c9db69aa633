"""`begin()`: the first cell of every lab."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from course_lib.lab import registry, store
from course_lib.lab.errors import LabError
from course_lib.lab.present import note, show
from course_lib.launch.fabric import gpus

PROBE = "progress"
DEVICES = ("auto", "cpu", "cuda")


def begin(submission: str = "", device: str = "auto") -> None:
    """Get a notebook ready: where its answers are kept, and a sentence for cells run out of order.

    `submission` is the path of a notebook to judge instead: the verdict is shown, and all cells after this one
    do nothing. Raises `LabError` if it could not be judged, and for a `device` that is not there.
    """
    if submission:
        _judge(submission)
        return
    _say_what_runs_where(device)
    with store.update(PROBE):
        pass
    if not store.is_kept():
        note(f"{store.folder()} cannot be written. The lab works, but forgets your progress when its kernel ends.")
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is not None:
        shell.set_custom_exc((NameError,), _explain)


def _say_what_runs_where(device: str) -> None:
    if device not in DEVICES:
        raise LabError(f"device={device!r}: choose one of {', '.join(DEVICES)}.")
    if device == "cuda":
        if not gpus():
            raise LabError("device='cuda': this machine shows no CUDA device. Leave device at 'auto'.")
        note("device='cuda': the parts \"On devices of your own\" of labs 04 and 12 run on your GPUs; for that `ranks` "
             f"may be at most {gpus()}. What is timed elsewhere emulates its devices and has wires of the rate that "
             "the text names, on every machine, so that predictions can be checked. Your own functions run on the GPUs "
             "with `launch.run(…, fabric='nccl')`, whole trainings with `python -m course_lib.train`.")


def _judge(submission: str) -> None:
    """Run the grader, as a process of its own, and show what a learner would get to see."""
    path = Path(submission)
    if not path.is_file():
        raise LabError(f"There is no file {submission!r} to judge (looked for in {Path.cwd()}).")
    command = [sys.executable, "-P", "-c", "from course_lib.cli import main; main()", "grade", _lab_of(path), str(path)]
    path_of_library = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), path_of_library])}
    with tempfile.TemporaryDirectory(prefix="course-verdict-") as folder:
        done = subprocess.run([*command, "--out", folder], env=environment, capture_output=True, text=True,
                              stdin=subprocess.DEVNULL)  # fmt: skip
        pages = sorted(Path(folder, "feedback").glob("*.html"))
        if done.returncode not in (0, 1) or not pages:
            raise LabError(f"{submission} could not be judged: {done.stderr.strip() or done.stdout.strip()}")
        page = pages[0].read_text(encoding="utf-8")
    show(page.partition("<body>")[2].rpartition("</body>")[0], done.stdout.strip())
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is not None:
        shell.input_transformers_cleanup.append(lambda lines: ["pass\n"])


def _lab_of(path: Path) -> str:
    """The lab that a notebook belongs to: by its exercises, else by its name, else the first that has exercises."""
    known = [number.partition(".")[0] for number in registry.everything()]
    text = path.read_text(encoding="utf-8", errors="replace")
    inside = re.search(r'"exercise":\s*"(\d+)\.\d+"', text)
    named = re.search(r"(\d\d)", path.stem)
    number = inside[1] if inside else named[1] if named else ""
    return number if number.lstrip("0") in known else known[0]


def _explain(shell, kind, error, trace, tb_offset=None) -> None:
    """IPython's handler for a missing name: one sentence where an exercise should have defined it."""
    if sentence := missing(getattr(error, "name", None)):
        error._render_traceback_ = lambda: [sentence]
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)


def missing(name: str | None) -> str:
    """What to say when `name` does not exist: which exercise defines it. Empty when none does."""
    numbers = [each.id for each in registry.everything().values() if each.needs == name]
    if not numbers:
        return ""
    return f"`{name}` does not exist yet: run the cell of exercise {' or '.join(numbers)} first."
