"""`begin()`: the first cell of every lab."""

from __future__ import annotations

import sys

from course_lib.lab import registry, store
from course_lib.lab.errors import LabError
from course_lib.lab.present import note

PROBE = "progress"


def begin(submission: str = "") -> None:
    """Get a notebook ready: where its answers are kept, and a sentence for cells run out of order.

    `submission` is the path of a notebook to judge instead. Raises `LabError` when it is given: this
    version of the course has no grader.
    """
    if submission:
        raise LabError(f"This version of course_lib cannot grade {submission!r} yet. Run the lab with submission=''.")
    with store.update(PROBE):
        pass
    if not store.is_kept():
        note(f"{store.folder()} cannot be written. The lab works, but forgets your progress when its kernel ends.")
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is not None:
        shell.set_custom_exc((NameError,), _explain)


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
