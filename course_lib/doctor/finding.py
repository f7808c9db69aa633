"""What an examination produces: findings in sections, each with a level and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["ok", "note", "warn", "fail"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warn", "fail")
"""`note` is worth knowing, `warn` spoils measurements or is not what its author meant, `fail` stops a lab."""


@dataclass(frozen=True)
class Finding:
    """One line of the report. `key` is stable for scripts, `data` holds the numbers behind the sentence."""

    key: str
    level: Level
    title: str
    value: str
    detail: str = ""
    remedy: str = ""
    source: str = ""
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """Findings that belong together."""

    name: str
    title: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Report:
    """All sections, and how long the examination took."""

    sections: tuple[Section, ...]
    seconds: float

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for section in self.sections for finding in section.findings)

    @property
    def ok(self) -> bool:
        """Whether everything that a lab needs works."""
        return all(finding.level != "fail" for finding in self.findings)
