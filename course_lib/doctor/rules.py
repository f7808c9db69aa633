"""What values an environment variable accepts. A rule is asked one thing: what is wrong with this value?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

_BEGINS = re.compile(r"\s*([-+]?)(0[xX][0-9a-fA-F]+|[0-9]+)")


def as_number(value: str) -> int | None:
    """What C's `strtoll` makes of it, as NCCL reads numbers: the number that the text begins with, decimal, 0x… or
    octal, and 0 where it begins with none; None for an empty text, which NCCL takes as not set."""
    if not value:
        return None
    match = _BEGINS.match(value)
    if match is None:
        return 0
    sign, digits = match.groups()
    if digits[:1] == "0" and digits[1:2] not in ("x", "X"):
        octal = re.match("[0-7]+", digits)
        number = int(octal.group(), 8) if octal else 0
    else:
        number = int(digits[:40], 0)
    return -number if sign == "-" else number


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
class Joined:
    """Words with | between them."""

    words: tuple[str, ...]

    def problem(self, value: str) -> str:
        wrong = [word for word in value.split("|") if word.strip().upper() not in self.words]
        return f"{wrong[0]!r} is none of {', '.join(self.words)}" if wrong else ""


@dataclass(frozen=True)
class Path:
    """A path as it is: nobody puts the home folder in for ~."""

    def problem(self, value: str) -> str:
        if not value.strip():
            return "it is empty"
        return "~ stands for no home folder here: write the path out" if value.startswith("~") else ""


@dataclass(frozen=True)
class Long:
    """Nothing, or a text of at least `least` characters."""

    least: int

    def problem(self, value: str) -> str:
        return "" if not value or len(value) >= self.least else f"it takes {self.least} characters at least"


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
