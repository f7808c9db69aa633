"""Silence for the measurement: whoever times ranks has the machine to itself, as far as this batch goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Quiet:
    """A lock file shared by the processes of a batch. Without one there is nobody to wait for."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work that others may do at the same time."""
        with self._locked(alone=False):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Work during which all others wait."""
        with self._locked(alone=True):
            yield

    @contextmanager
    def _locked(self, alone: bool) -> Iterator[None]:
        if self._path is None:
            yield
            return
        import fcntl

        with open(self._path, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            yield
