"""Choose a bucket size: predict from one run, then verify by measuring."""

from __future__ import annotations

from course_lib.tune.calibrate import Load, calibrate
from course_lib.tune.choice import Choice
from course_lib.tune.choose import choose
from course_lib.tune.sweep import Measured, Sweep, compare, sweep

__all__ = ["Choice", "Load", "Measured", "Sweep", "calibrate", "choose", "compare", "sweep"]
