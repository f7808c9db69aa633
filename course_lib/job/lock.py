"""One run at a time in a folder: two would take each other's files away."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import time
from pathlib import Path
from typing import IO

from course_lib.job.together import JobError

PATIENCE_S = 10.0
"""How long a run waits for the one before it, whose ranks may still be dying when torchrun starts new ones."""


def take(out: Path) -> IO[bytes]:
    """A file whose lock this process holds until it closes it or ends, however it ends. Raises `JobError` where another
    process has it and keeps it. Where the file system has no locks, a warning is all."""
    path, end = out / ".lock", time.monotonic() + PATIENCE_S
    file = path.open("ab+", buffering=0)  # what the holder wrote stays
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):
            if time.monotonic() > end:
                file.close()
                raise JobError(f"another run ({path.read_text() or 'unknown'}) writes to {out}; wait for its end, or "
                               "give another --out") from None
            time.sleep(0.1)
        except OSError as error:
            print(f"course_lib.train: {out} cannot be locked ({error.strerror}): see to it that no other run is given "
                  "this --out.", file=sys.stderr, flush=True)
            return file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    return file
