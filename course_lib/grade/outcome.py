"""What can become of a submission and of an exercise, and which of several outcomes names the whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from course_lib.lab.model import Row

SEVERITY = (
    "ok",
    "stub_left",
    "failed_checks",
    "timing_unstable",
    "impossible",
    "early_exit",
    "output_flood",
    "out_of_memory",
    "kernel_died",
    "timeout",
    "template_mismatch",
    "unreadable",
    "grader_error",
)
"""Every outcome, mildest first. The status of a submission is the most severe outcome of its parts."""

NEEDS_A_PERSON = {"timing_unstable", "impossible", "grader_error"}
"""Outcomes that a person has to look at: the exit code of a batch says so."""


@dataclass(frozen=True)
class Part:
    """One exercise, or the measurement, judged. `points` is None where the grader itself failed."""

    id: str
    title: str
    outcome: str
    points: float | None
    max_points: float
    sentence: str = ""
    hint: str = ""
    rows: tuple[Row, ...] = ()

    def as_dict(self) -> dict:
        """Plain JSON types, for the journal."""
        rows = [{"name": r.name, "ok": r.ok, "expected": r.expected, "seen": r.seen} for r in self.rows]
        return {**self.__dict__, "rows": rows}

    @classmethod
    def from_dict(cls, data: dict) -> Part:
        return cls(**{**data, "rows": tuple(Row(**row) for row in data["rows"])})


@dataclass(frozen=True)
class Judgement:
    """A submission judged. `flags` are remarks about its cells, `facts` what the judgement was made with."""

    id: str
    lab: str
    parts: tuple[Part, ...]
    status: str
    note: str = ""
    isolation: str = ""
    overlap: float | None = None
    fair_score: float | None = None
    seconds: float = 0.0
    flags: tuple[str, ...] = ()
    facts: dict = field(default_factory=dict)

    @property
    def points(self) -> float | None:
        """The sum of the parts; None, not 0, if the grader failed on one."""
        if any(part.points is None for part in self.parts):
            return None
        return sum(part.points for part in self.parts)

    @property
    def max_points(self) -> float:
        return sum(part.max_points for part in self.parts)

    def as_dict(self) -> dict:
        return {**self.__dict__, "parts": [part.as_dict() for part in self.parts], "flags": list(self.flags)}

    @classmethod
    def from_dict(cls, data: dict) -> Judgement:
        parts = tuple(Part.from_dict(part) for part in data["parts"])
        return cls(**{**data, "parts": parts, "flags": tuple(data["flags"])})


def worst(outcomes: Iterable[str]) -> str:
    """The most severe of the outcomes; `ok` for none."""
    return max(outcomes, key=SEVERITY.index, default="ok")
