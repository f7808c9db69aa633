"""Lab 05, measure it."""

from course_lib.lab.exercises.lab05.best_size import the_best_size
from course_lib.lab.exercises.lab05.diagnosis import diagnose_traces
from course_lib.lab.exercises.lab05.exposed import exposed_and_hidden
from course_lib.lab.exercises.lab05.union import union_of_intervals

__all__ = ["diagnose_traces", "exposed_and_hidden", "the_best_size", "union_of_intervals"]
