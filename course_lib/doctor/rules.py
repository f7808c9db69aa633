"""What values an environment variable accepts. A rule is asked one thing: what is wrong with this value?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Rule(Protocol):
    """`problem` is empty for a value that is accepted, else what is accepted instead."""

    def problem(self, value: str) -> str: ...


@dataclass(frozen=True)
class Whole:
    """A whole number, decimal or 0x…, between `low` and `high` and a multiple of `step`."""

    low: int | None = None
    high: int | None = None
    step: int = 1

    def problem(self, value: str) -> str:
        try:
            number = int(value, 0)
        except ValueError:
            return f"it takes a whole number{self._range()}"
        low, high = self.low, self.high
        fits = (low is None or number >= low) and (high is None or number <= high) and number % self.step == 0
        return "" if fits else f"it takes a whole number{self._range()}"

    def _range(self) -> str:
        parts = []
        if self.low is not None and self.high is not None:
            parts.append(f"from {self.low} to {self.high}")
        elif self.low is not None:
            parts.append(f"of at least {self.low}")
        if self.step > 1:
            parts.append(f"that is a multiple of {self.step}")
        return "".join(f" {part}" for part in parts)


@dataclass(frozen=True)
class Words:
    """One of some words; with `exact`, upper and lower case differ; with `numbers`, a number of old times too."""

    words: tuple[str, ...]
    exact: bool = False
    numbers: bool = False

    def problem(self, value: str) -> str:
        if self.numbers and value[:1].isdigit():
            return ""
        known = self.words if self.exact else tuple(word.lower() for word in self.words)
        if (value if self.exact else value.lower()) in known:
            return ""
        case = ", in this spelling" if self.exact and value.upper() in self.words else ""
        return f"it takes one of {', '.join(self.words)}{case}"


@dataclass(frozen=True)
class Listed:
    """Words separated by commas, perhaps after ^; per function after a colon, separated by semicolons (NCCL 2.24)."""

    words: tuple[str, ...]

    def problem(self, value: str) -> str:
        lists = [part.rpartition(":")[2] for part in value.split(";")]
        asked = [word.strip().lower() for part in lists for word in part.removeprefix("^").split(",")]
        known = {word.lower() for word in self.words}
        wrong = [word for word in asked if word not in known]
        return f"{wrong[0]!r} is none of {', '.join(self.words)}" if wrong else ""


@dataclass(frozen=True)
class Positive:
    """A number above 0."""

    def problem(self, value: str) -> str:
        try:
            return "" if float(value) > 0 else "it takes a number above 0"
        except ValueError:
            return "it takes a number above 0"


@dataclass(frozen=True)
class Text:
    """Anything that is not empty: names, paths, addresses."""

    def problem(self, value: str) -> str:
        return "" if value.strip() else "it is empty"


@dataclass(frozen=True)
class Anything:
    """Any value at all, an empty one too."""

    def problem(self, value: str) -> str:
        return ""
