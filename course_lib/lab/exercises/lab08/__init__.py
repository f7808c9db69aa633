"""Lab 08, the last mile."""

from course_lib.lab.exercises.lab08.delayed import delay_the_update
from course_lib.lab.exercises.lab08.rounds import average_in_rounds
from course_lib.lab.exercises.lab08.step import step_per_bucket

__all__ = ["average_in_rounds", "delay_the_update", "step_per_bucket"]
