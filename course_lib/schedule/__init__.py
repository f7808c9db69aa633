"""Pipeline schedules as data: generators, passes, a proof that they run. `schedule.execute` runs them on ranks and
`simulate.pipeline` predicts them; nothing that is imported here needs torch."""

from course_lib.schedule.action import Action, Op, Schedule, ScheduleError
from course_lib.schedule.check import Facts, check
from course_lib.schedule.generators import breadth_first, gpipe, interleaved, one_f_one_b, zb_v, zero_bubble
from course_lib.schedule.messages import add_messages, early_receives, with_messages
from course_lib.schedule.passes import (
    add_gathers,
    add_reductions,
    add_steps,
    move_earlier,
    move_later,
    split_backward,
)

__all__ = ["Action", "Facts", "Op", "Schedule", "ScheduleError", "add_gathers", "add_messages", "add_reductions",
           "add_steps", "breadth_first", "check", "early_receives", "gpipe", "interleaved", "move_earlier",
           "move_later", "one_f_one_b", "split_backward", "with_messages", "zb_v", "zero_bubble"]
