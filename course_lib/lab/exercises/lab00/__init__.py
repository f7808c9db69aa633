"""Lab 00, start here."""

from course_lib.lab.exercises.lab00.exposed import exposed_time
from course_lib.lab.exercises.lab00.ranks import part_of_the_mean

__all__ = ["exposed_time", "part_of_the_mean"]
