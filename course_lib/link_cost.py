"""What a collective costs on a wire that is otherwise idle."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LinkCost:
    """Cost of one collective on an idle wire: `a_s` seconds of latency plus `beta_s_per_byte` for every
    byte of gradient (a ring all-reduce has a = 2(n−1)·α and β = 2(n−1)/n·β_wire). Fit both in the run
    they are compared with. Raises `ValueError` when either is negative or not finite."""

    a_s: float
    beta_s_per_byte: float

    def __post_init__(self) -> None:
        for name, value in (("a_s", self.a_s), ("beta_s_per_byte", self.beta_s_per_byte)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}, but a cost cannot be negative or infinite; "
                                 "fit it again from larger and more messages, or use 0")

    def cost(self, bytes: float) -> float:
        """Seconds that one collective of `bytes` bytes of gradient occupies the wire."""
        return self.a_s + self.beta_s_per_byte * bytes
