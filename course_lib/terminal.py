"""A rich console for the command line's tables, at home on a terminal, in a pipe and in a log."""

from __future__ import annotations

from typing import IO

from rich.console import Console

COLUMNS = 80


def console(file: IO[str]) -> Console:
    """Writes to `file`. Without a terminal, and on one narrower than that, lines have 80 columns.

    A sign that the file's encoding lacks becomes a question mark instead of an error.
    """
    if hasattr(file, "reconfigure"):
        file.reconfigure(errors="replace")
    found = Console(file=file, highlight=False)
    if found.is_terminal and found.width >= COLUMNS:
        return found
    return Console(file=file, highlight=False, width=COLUMNS)
