"""Lab 12, ZeRO."""

from course_lib.lab.exercises.lab12.prefetch import prefetch_the_next
from course_lib.lab.exercises.lab12.scatter import scatter_the_buckets
from course_lib.lab.exercises.lab12.step import shard_the_optimizer

__all__ = ["prefetch_the_next", "scatter_the_buckets", "shard_the_optimizer"]
