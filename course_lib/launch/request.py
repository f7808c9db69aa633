"""What a run is: the message that travels from `run()` to the process that supervises the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from course_lib.launch.fabric import Fabric


@dataclass(frozen=True)
class Request:
    """`payload` is the cloudpickled `(fn, args)`. Everything else is plain."""

    payload: bytes
    ranks: int
    fabric: Fabric
    timeout_s: float
    cwd: str
    path: tuple[str, ...]
    environ: dict[str, str] = field(repr=False)


RETURN_PLAIN = "Return numbers, strings, tensors, or lists and dictionaries of these."


class RunError(RuntimeError):
    """A run did not deliver a result from every rank."""


class RankFailed(RunError):
    """An exception on a rank. `rank` and `traceback_text` say where; `cause` is the exception if it could travel."""

    def __init__(self, rank: int, traceback_text: str, cause: BaseException | None = None) -> None:
        self.rank, self.traceback_text, self.cause = rank, traceback_text, cause
        super().__init__(f"rank {rank} failed:\n{traceback_text.rstrip()}")


class RankDied(RunError):
    """A rank ended without a result: killed by a signal, out of memory, or it called `os._exit`."""

    def __init__(self, rank: int, status: int) -> None:
        self.rank, self.status = rank, status
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        hint = " (the kernel kills with signal 9 when memory runs out)" if status == -9 else ""
        super().__init__(f"rank {rank} died without a result: {how}{hint}")


class RunTimeout(RunError):
    """The ranks did not end in time. The message names the rank that the others wait for."""


class RunNotStarted(RunError):
    """The wires or the processes could not be set up."""
