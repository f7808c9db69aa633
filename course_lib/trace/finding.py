"""What a rule of the diagnosis says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One answer. `code` is stable, `says` is the finding in a sentence, `evidence` the numbers behind it, `do` what to
    try next, `ranks` whom it concerns, and `cost` the nanoseconds at stake (summed over ranks; None if unknown)."""

    code: str
    says: str
    evidence: str
    do: str
    ranks: tuple[int, ...] = ()
    cost: int | None = None
