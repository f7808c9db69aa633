"""Lab 11, tensor and sequence parallel."""

from course_lib.lab.exercises.lab11.chunks import gather_in_chunks
from course_lib.lab.exercises.lab11.pair import column_and_row
from course_lib.lab.exercises.lab11.sequence import cut_the_sequence

__all__ = ["column_and_row", "cut_the_sequence", "gather_in_chunks"]
