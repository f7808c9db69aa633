"""Lab 04, gradient buckets."""

from course_lib.lab.exercises.lab04.assign import assign_buckets
from course_lib.lab.exercises.lab04.finish import finish_the_window
from course_lib.lab.exercises.lab04.launch import launch_when_full
from course_lib.lab.exercises.lab04.plan import best_plan
from course_lib.lab.exercises.lab04.rebuild import rebuild_the_order

__all__ = ["assign_buckets", "best_plan", "finish_the_window", "launch_when_full", "rebuild_the_order"]
