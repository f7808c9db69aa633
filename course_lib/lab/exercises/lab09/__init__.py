"""Lab 09, know the wires."""

from course_lib.lab.exercises.lab09.choose import choose_the_bucket
from course_lib.lab.exercises.lab09.ring import reduce_around_the_ring
from course_lib.lab.exercises.lab09.two_levels import reduce_in_two_levels

__all__ = ["choose_the_bucket", "reduce_around_the_ring", "reduce_in_two_levels"]
