"""Lab 01, why accumulate."""

from course_lib.lab.exercises.lab01.memory import bytes_per_rank
from course_lib.lab.exercises.lab01.steps import accumulation_steps
from course_lib.lab.exercises.lab01.traffic import bytes_per_update

__all__ = ["accumulation_steps", "bytes_per_rank", "bytes_per_update"]
