"""What a reader has to say about a file besides its numbers, and the error for what it cannot read."""

from __future__ import annotations

from dataclasses import dataclass


class TraceError(ValueError):
    """A file that is not a Chrome trace, or cannot be opened: one sentence with the file and what to do."""


@dataclass(frozen=True)
class Note:
    """Something repaired, dropped or doubtful. `code` is stable and for programs, `text` is for people, `count` says
    how many events or places it concerns."""

    code: str
    text: str
    count: int = 1
