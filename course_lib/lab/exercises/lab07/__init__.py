"""Lab 07, send less."""

from course_lib.lab.exercises.lab07.checkpoint import keep_the_residual
from course_lib.lab.exercises.lab07.half import send_half
from course_lib.lab.exercises.lab07.one_bit import send_one_bit
from course_lib.lab.exercises.lab07.top_k import send_the_largest

__all__ = ["keep_the_residual", "send_half", "send_one_bit", "send_the_largest"]
