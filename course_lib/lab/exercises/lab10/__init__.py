"""Lab 10, the pipeline."""

from course_lib.lab.exercises.lab10.depth import count_the_micro_batches
from course_lib.lab.exercises.lab10.one_f_one_b import generate_one_f_one_b
from course_lib.lab.exercises.lab10.receives import place_the_receives
from course_lib.lab.exercises.lab10.split import split_the_backward

__all__ = ["count_the_micro_batches", "generate_one_f_one_b", "place_the_receives", "split_the_backward"]
