"""Our schedules, action by action, against those of `torch.distributed.pipelining`."""

from __future__ import annotations

import itertools

import pytest

from course_lib.schedule import (
    Action,
    Op,
    add_messages,
    early_receives,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_v,
    zero_bubble,
)
from tests.schedule import torch_schedules as theirs

SIZES = [(p, m) for p in range(1, 6) for m in (1, 2, 3, 4, 5, 7, 8, 10)]
LOOPED = [(p, m, v) for p, m, v in itertools.product((1, 2, 3, 4), (1, 3, 4, 6, 8, 10), (1, 2, 3))]


def lists(schedule) -> list[list[Action]]:
    return [list(actions) for actions in schedule.ranks]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe(p: int, m: int) -> None:
    assert theirs.compute(theirs.single("ScheduleGPipe", p, m)) == lists(gpipe(p, m))


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= p])
def test_1f1b(p: int, m: int) -> None:
    expected = theirs.compute(theirs.single("Schedule1F1B", p, m))
    # torch's list for the last rank, which only its visualiser reads, counts forwards from 1
    expected[-1] = [Action(a.op, a.stage, a.index - (a.op is Op.F)) for a in expected[-1]]
    assert expected == lists(one_f_one_b(p, m))


@pytest.mark.parametrize(("name", "make"), [("ScheduleInterleaved1F1B", interleaved),
                                            ("ScheduleInterleavedZeroBubble", zero_bubble)])
@pytest.mark.parametrize(("p", "m", "v"), LOOPED)
def test_looped(name: str, make, p: int, m: int, v: int) -> None:
    mine = make(p, m, v)
    try:
        torchs = theirs.multi(name, p, m, v)
    except ValueError:
        assert m % max(1, m // p), "torch refuses only what its rounds do not divide"
        return
    assert theirs.compute(torchs.pipeline_order) == lists(mine)
    assert [torchs.stage_index_to_group_rank[s] for s in range(p * v)] == list(mine.rank_of)
    assert theirs.lowered(torchs.pipeline_order, mine.rank_of) == lists(early_receives(add_messages(mine)))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zb_v(p: int, m: int) -> None:
    torchs, mine = theirs.multi("ScheduleZBVZeroBubble", p, m, 2), zb_v(p, m)
    assert theirs.compute(torchs.pipeline_order) == lists(mine)
    assert [torchs.stage_index_to_group_rank[s] for s in range(2 * p)] == list(mine.rank_of)
    assert theirs.lowered(torchs.pipeline_order, mine.rank_of) == lists(early_receives(add_messages(mine)))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_messages_of_one_stage_a_rank(p: int, m: int) -> None:
    mine = gpipe(p, m)
    found = theirs.lowered(theirs.single("ScheduleGPipe", p, m), mine.rank_of)
    assert found == lists(early_receives(add_messages(mine)))
