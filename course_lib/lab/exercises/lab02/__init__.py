"""Lab 02, the serial baseline."""

from course_lib.lab.exercises.lab02.average import average_the_gradients
from course_lib.lab.exercises.lab02.cost import predict_the_baseline

__all__ = ["average_the_gradients", "predict_the_baseline"]
