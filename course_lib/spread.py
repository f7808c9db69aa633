"""The spread that goes beside every median."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def half_iqr(values: Sequence[float]) -> float:
    """Half the distance between the quartiles, in the unit of `values`; needs two of them."""
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / 2
