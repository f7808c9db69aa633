"""What a notebook calls: `begin`, `predict`, `compare`, `check`, `hint`, `calibrate`, `review`.

>>> from course_lib import lab
>>> lab.begin()
>>> lab.predict("4.best_bucket", "Which bucket size is the fastest on this wire?", unit="MB")
>>> lab.check("4.1", assign_buckets)
"""

from course_lib.lab.checking import check, evaluate
from course_lib.lab.errors import CheckFailed, LabError
from course_lib.lab.hints import hint
from course_lib.lab.measuring import calibrate, review
from course_lib.lab.model import CheckResult, Exercise, Planted, Row, Verdict, exercise
from course_lib.lab.opening import begin
from course_lib.lab.prediction import compare, predict, predictions
from course_lib.lab.record import progress

__all__ = [
    "CheckFailed",
    "CheckResult",
    "Exercise",
    "LabError",
    "Planted",
    "Row",
    "Verdict",
    "begin",
    "calibrate",
    "check",
    "compare",
    "evaluate",
    "exercise",
    "hint",
    "predict",
    "predictions",
    "progress",
    "review",
]
