"""Lab 13, the joint schedule."""

from course_lib.lab.exercises.lab13.beat import beat_the_given_schedule
from course_lib.lab.exercises.lab13.layout import choose_the_layout
from course_lib.lab.exercises.lab13.reductions import reduce_at_the_last_use

__all__ = ["beat_the_given_schedule", "choose_the_layout", "reduce_at_the_last_use"]
