"""Schedules as text, and what cannot be written down."""

from __future__ import annotations

import pytest

from course_lib.schedule import Action, Op, Schedule, ScheduleError, add_messages, gpipe, interleaved, zb_v, zero_bubble


@pytest.mark.parametrize("schedule", [gpipe(1, 1), gpipe(3, 2), interleaved(2, 5, 3), zero_bubble(3, 4), zb_v(2, 3),
                                      add_messages(zb_v(3, 6))])
def test_round_trip(schedule: Schedule) -> None:
    assert Schedule.parse(schedule.text()) == schedule
    assert all(Action.parse(str(a)) == a for actions in schedule.ranks for a in actions)


def test_a_pipeline_is_written_as_on_a_whiteboard() -> None:
    assert Schedule.parse("F0 F1 B0 B1\nF0 F1 B0 B1") == gpipe(2, 2)
    assert gpipe(2, 2).text().splitlines() == ["stages on ranks 0 1; 2 micro-batches", "rank 0: F0 F1 B0 B1",
                                               "rank 1: F0 F1 B0 B1"]
    assert "F0@0" in zb_v(2, 3).text()


@pytest.mark.parametrize(("text", "says"), [
    ("F0 G0", "'G0' is not an action"), ("F B0", "'F': F takes a number"), ("F0 free3", "free takes no number"),
    ("F0@1 B0", r"rank 0 has F0@1, but holds only stages \[0\]"), ("", "at least one of each"), ("F0 B0 W7", "0 to 0"),
    ("stages 0\nrank 0: F0", "heading cannot be read"), ("F0 B0 reduce0", "names buckets"),
    ("stages on ranks 0 0; 1 micro-batches\nF0 B0", "name the stage, as in F0@0"),
    ("stages on ranks 0 2; 1 micro-batches\nF0 B0\nF0 B0", "one list for each rank"),
])
def test_refusals(text: str, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        Schedule.parse(text)


@pytest.mark.parametrize(("p", "m", "v"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sizes_that_cannot_be(p: int, m: int, v: int) -> None:
    with pytest.raises(ScheduleError, match="must be at least 1"):
        interleaved(p, m, v)


def test_actions_are_small_frozen_values() -> None:
    assert Action(Op.SEND_F, 1, 4).partner() == Action(Op.RECV_F, 2, 4)
    assert Action(Op.RECV_B, 1, 4).partner() == Action(Op.SEND_B, 2, 4)
    assert {Action(Op.F, 0, 1), Action(Op.F, 0, 1)} == {Action.parse("F1", 0)}
