"""What learners do not see: cutting the marked regions out of a cell.

    ### BEGIN SOLUTION … ### END SOLUTION            becomes `raise NotImplementedError("exercise 4.1")`
    ### BEGIN HIDDEN TESTS … ### END HIDDEN TESTS    disappears

The spelling is nbgrader's. Anything that only resembles a marker is an error, because a marker that is
not recognised would hand the solution out.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MARKER = re.compile(r"^(?P<indent>\s*)### (?P<edge>BEGIN|END) (?P<kind>SOLUTION|HIDDEN TESTS)\s*$")
RESEMBLING = re.compile(r"#.*\b(BEGIN|END)[\s_-]*(SOLUTION|HIDDEN[\s_-]*TESTS?)\b", re.IGNORECASE)


class MarkerError(ValueError):
    """The markers of a cell do not pair up. The message gives the line within the cell."""


class Cut(NamedTuple):
    """A cell as learners get it, and how many regions of each kind were taken out."""

    source: str
    solutions: int
    hidden_tests: int


def has_marker(source: str) -> bool:
    """Whether the text holds a marker, or something that resembles one."""
    return any(RESEMBLING.search(line) for line in source.splitlines())


def cut(source: str, exercise: str | None) -> Cut:
    """Take the marked regions out of `source`.

    `exercise` is the id that the stub names ("4.1"). Raises `MarkerError` when markers do not pair up,
    when one is misspelt, when a solution is empty, or when there is a solution but no exercise id.
    """
    kept: list[str] = []
    count = {"SOLUTION": 0, "HIDDEN TESTS": 0}
    kind, begun, body = "", 0, 0
    for number, line in enumerate(source.splitlines(), start=1):
        marker = MARKER.match(line)
        if marker is None:
            if RESEMBLING.search(line):
                raise MarkerError(f"line {number} resembles a marker: write `### BEGIN SOLUTION`, alone on its line")
            if kind:
                body += bool(line.strip() and not line.lstrip().startswith("#"))
            else:
                kept.append(line)
            continue
        if marker["edge"] == "BEGIN":
            if kind:
                raise MarkerError(f"line {number} begins {marker['kind']} inside the {kind} begun on line {begun}")
            kind, begun, body = marker["kind"], number, 0
            if kind == "SOLUTION":
                if exercise is None:
                    raise MarkerError(f'line {number} begins a solution, but the cell header has no exercise="…"')
                kept.append(f'{marker["indent"]}raise NotImplementedError("exercise {exercise}")')
            continue
        if kind != marker["kind"]:
            raise MarkerError(f"line {number} ends {marker['kind']}, but {kind or 'nothing'} is open there")
        if kind == "SOLUTION" and not body:
            raise MarkerError(f"the solution begun on line {begun} is empty")
        count[kind] += 1
        kind = ""
    if kind:
        raise MarkerError(f"the {kind} begun on line {begun} is never ended")
    return Cut("\n".join(kept).strip("\n"), count["SOLUTION"], count["HIDDEN TESTS"])
