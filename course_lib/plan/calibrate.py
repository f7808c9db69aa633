"""Fitting the four efficiencies of a type of GPU to published runs, and the error for a run that a fit left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from course_lib.plan.hardware import Efficiency
from course_lib.plan.published import TimeRow

START = Efficiency(0.75, 0.75, 0.5, 0.7)
OUTLIER = 0.05
"""Relative error from which a row's weight falls off, so that runs with troubles of their own do not set the rest."""


def family(row: TimeRow) -> str:
    """Rows of one type of GPU share their efficiencies: A100 with 40 or 80 GB, H100 with any memory."""
    return row.cluster.gpu.name.partition("-")[0]


def fit(rows: Sequence[TimeRow], start: Efficiency = START, rounds: int = 12) -> Efficiency:
    """Least squares of the logarithm of predicted over published time (Gauss–Newton, with less weight for outliers).
    Every source counts the same, whatever its number of rows."""
    counted = Counter(row.source for row in rows)
    weight = np.sqrt([1 / counted[row.source] for row in rows])
    x = np.log(start)
    for _ in range(rounds):
        error, slope = _errors(rows, x), _slopes(rows, x)
        w = weight / (1 + (error / OUTLIER) ** 2) ** 0.25
        # The last rows hold back what the runs do not determine.
        A = np.vstack([w[:, None] * slope, 0.05 * np.eye(x.size)])
        move = np.linalg.lstsq(A, np.concatenate([-w * error, np.zeros(x.size)]), rcond=None)[0]
        x = x + np.clip(move, -0.3, 0.3)
    return Efficiency(*np.exp(x).round(4).tolist())


def left_out(rows: Sequence[TimeRow]) -> list[float]:
    """For each row the relative error of a fit to all the others: (predicted − published) / published."""
    found = []
    for row in rows:
        efficiency = fit([other for other in rows if other is not row], rounds=6)
        found.append(row.predicted(efficiency) / row.seconds - 1)
    return found


def _errors(rows: Sequence[TimeRow], x: np.ndarray) -> np.ndarray:
    efficiency = Efficiency(*np.exp(x).tolist())
    return np.log([row.predicted(efficiency) / row.seconds for row in rows])


def _slopes(rows: Sequence[TimeRow], x: np.ndarray, by: float = 1e-3) -> np.ndarray:
    here = _errors(rows, x)
    return np.stack([(_errors(rows, x + by * unit) - here) / by for unit in np.eye(x.size)], axis=1)
