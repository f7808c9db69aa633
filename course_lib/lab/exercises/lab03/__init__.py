"""Lab 03, wait with sending: no_sync."""

from course_lib.lab.exercises.lab03.clip import clip_at_the_right_place
from course_lib.lab.exercises.lab03.epoch import the_last_short_window
from course_lib.lab.exercises.lab03.ragged import normalise_a_window
from course_lib.lab.exercises.lab03.sync import send_once

__all__ = ["clip_at_the_right_place", "normalise_a_window", "send_once", "the_last_short_window"]
