"""Lab 06, every micro-step, asynchronously."""

from course_lib.lab.exercises.lab06.argument import predict_both
from course_lib.lab.exercises.lab06.buffers import double_the_buffer
from course_lib.lab.exercises.lab06.feed import feed_the_device

__all__ = ["double_the_buffer", "feed_the_device", "predict_both"]
