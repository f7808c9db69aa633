"""`course grade` on the command line: what it says, and its exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from course_lib.grade import batch, sandbox

INTERRUPTED = 130


def grade_command(lab: str | None, place: Path | None, out: Path | None, *, jobs: int, only: Sequence[str],
                  regrade: bool, seed: int | None, require_isolation: bool, self_check: bool,
                  notebook: bool) -> int:  # fmt: skip
    """Returns the exit code: 0 all graded, 1 a person is needed, 2 usage, 3 environment, 4 grader bug, 130."""
    if lab is None and not self_check:
        return _refuse("say which lab: course grade 04 submissions/ --out grades/", batch.USAGE)
    if self_check == (place is not None):
        return _refuse("give a folder of submissions, or --self-check", batch.USAGE)
    if place is not None and out is None:
        return _refuse("say where the records go: --out grades/", batch.USAGE)
    if require_isolation and sandbox.level() == sandbox.WEAK:
        return _refuse("no sandbox can be built here (user namespaces are missing), and --require-isolation was given",
                       batch.ENVIRONMENT)  # fmt: skip
    try:
        root = batch.find_root()
        if self_check:
            from course_lib.grade.selfcheck import self_check as run_self_check

            return run_self_check(root, lab or "04", jobs=jobs, seed=seed)
        with _ended_as_by_ctrl_c():
            judgements = batch.grade(lab, place, out, root=root, jobs=jobs, only=only, regrade=regrade, seed=seed,
                                     notebook=notebook, say=_progress())  # fmt: skip
    except (FileNotFoundError, ValueError) as error:
        return _refuse(str(error), batch.USAGE)
    except OSError as error:
        return _refuse(str(error), batch.ENVIRONMENT)
    except KeyboardInterrupt:
        print("\ncourse: interrupted; what is judged is in the journal", file=sys.stderr)
        return INTERRUPTED
    print("\n" + batch.table(judgements))
    return batch.exit_code(judgements)


@contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """A batch that `kill`, a time limit or a closed terminal ends leaves no worker and no folder behind either."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:  # `nohup` ignores SIGHUP, and means it
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _progress():
    """One line that is written over on a terminal, plain lines elsewhere."""
    if not sys.stdout.isatty():
        return lambda text: print(text, flush=True)
    return lambda text: print(f"\r\x1b[K{text[:100]}", end="", flush=True)


def _refuse(sentence: str, code: int) -> int:
    print(f"course: {sentence}", file=sys.stderr)
    return code
