"""Passes: what they add or move, against torch's own passes, and that the result still runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from course_lib.link_cost import LinkCost
from course_lib.schedule import (
    Action,
    Op,
    Schedule,
    ScheduleError,
    add_gathers,
    add_messages,
    add_reductions,
    add_steps,
    check,
    early_receives,
    gpipe,
    interleaved,
    move_earlier,
    move_later,
    one_f_one_b,
    split_backward,
    with_messages,
    zb_v,
    zero_bubble,
)
from course_lib.simulate.pipeline import Costs, predict
from tests.schedule import torch_schedules as theirs


def words(schedule: Schedule, rank: int) -> str:
    return schedule.text().splitlines()[1 + rank].split(": ")[1]


def test_split_backward_sends_before_the_weights() -> None:
    split = split_backward(early_receives(add_messages(one_f_one_b(2, 2))))
    assert words(split, 1) == "recv_F0 F0 recv_F1 I0 send_B0 W0 F1 I1 send_B1 W1"
    check(split)
    assert check(split_backward(gpipe(3, 4))).peak_activations == (4, 4, 4)


def test_receives_ahead_keep_their_order_and_let_messages_travel_under_compute() -> None:
    bare = one_f_one_b(2, 3)
    made = early_receives(add_messages(bare), ahead=1)
    assert words(made, 1) == "recv_F0 recv_F1 F0 B0 send_B0 recv_F2 F1 B1 send_B1 F2 B2 send_B2"
    assert with_messages(bare) == made and with_messages(made) == made
    slow = Costs(F=0.01, B=0.01, link=LinkCost(0.0, 1e-3), message_bytes=4)
    steps = [predict(early_receives(add_messages(gpipe(2, 3)), ahead), slow).step_s for ahead in (0, 1)]
    assert steps == pytest.approx([0.104, 0.088])  # every message waited for, or only the first and the last
    for schedule in (zero_bubble(3, 7), interleaved(3, 5, 2), zb_v(3, 6)):
        check(early_receives(add_messages(schedule), ahead=2))


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (3, 6, 3), (4, 8, 2), (2, 5, 3), (1, 3, 4)])
@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_gathers_reductions_and_messages_are_torchs(p: int, m: int, v: int, at_once: int) -> None:
    for name, make in (("ScheduleInterleaved1F1B", interleaved), ("ScheduleInterleavedZeroBubble", zero_bubble)):
        try:
            torchs = theirs.multi(name, p, m, v)
        except ValueError:
            continue
        mine = add_reductions(add_gathers(make(p, m, v), at_once))
        found = theirs.lowered(torchs.pipeline_order, mine.rank_of, at_once, micro=m)
        assert found == [list(a) for a in early_receives(add_messages(mine)).ranks]


@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
def test_no_more_than_at_once_stages_are_gathered(at_once: int) -> None:
    facts = check(add_gathers(interleaved(2, 8, 4), at_once))
    assert facts.peak_gathered == (at_once, at_once)


def test_reductions_of_every_bucket_and_steps() -> None:
    made = add_steps(add_reductions(split_backward(one_f_one_b(2, 2)), [2, 1]))
    assert words(made, 0).endswith("I1 W1 reduce0 reduce1 step")
    assert words(made, 1).endswith("I1 W1 reduce0 step")
    check(made)
    assert Schedule.parse(made.text()) == made


def test_reductions_move_between_the_last_backward_and_the_step() -> None:
    made = add_steps(add_reductions(interleaved(2, 4, 2)))
    late = move_later(made, Op.REDUCE)
    assert words(late, 0).endswith("reduce0@2 reduce0@0 step@0 step@2")
    assert move_earlier(late, Op.REDUCE) == move_earlier(made, Op.REDUCE)
    check(late)
    one = move_later(made, Op.REDUCE, by=1)
    actions = list(one.ranks[0])
    last = max(k for k, a in enumerate(actions) if a.stage == 2 and a.op is Op.B)
    assert actions[last + 1].op is Op.B and actions[last + 2] == Action(Op.REDUCE, 2, 0)


def test_a_cap_holds_reductions_back_from_moving_later() -> None:
    made = add_reductions(interleaved(2, 4, 3))

    def waiting(schedule: Schedule) -> int:
        peak = 0
        for actions in schedule.ranks:
            for k in range(len(actions)):
                ended = {a.stage for a in actions[:k + 1] if a.op is Op.B} - {a.stage for a in actions[k + 1:]
                                                                             if a.op is Op.B}
                peak = max(peak, len(ended - {a.stage for a in actions[:k + 1] if a.op is Op.REDUCE}))
        return peak

    assert [waiting(move_later(made, Op.REDUCE, cap=cap)) for cap in (1, 2, 3)] == [1, 2, 3]


def test_gathers_move_earlier_under_a_cap_and_hide() -> None:
    base = add_gathers(interleaved(2, 4, 2), at_once=1)
    costs = Costs(F=0.01, B=0.02, gather=0.01)
    times = []
    for cap in (1, 2):
        moved = move_earlier(base, Op.GATHER, cap=cap)
        assert max(check(moved).peak_gathered) == cap
        times.append(predict(moved, costs).step_s)
    assert times[0] == predict(base, costs).step_s > times[1]
    assert move_later(move_earlier(base, Op.GATHER), Op.GATHER) == base


def test_reducing_each_stage_when_its_own_backward_is_done_hides_most_of_it() -> None:
    costs = Costs(F=0.01, B=0.02, reduce=0.02)
    early = add_reductions(interleaved(4, 8, 2))
    tail = predict(move_later(early, Op.REDUCE), costs).step_s
    bare = predict(interleaved(4, 8, 2), costs).step_s
    assert bare < predict(early, costs).step_s < tail
    assert tail == pytest.approx(bare + 2 * 0.02)


def replace(schedule: Schedule, rank: int, text: str) -> Schedule:
    lines = schedule.text().splitlines()
    lines[1 + rank] = text
    return Schedule.parse("\n".join(lines))


TWO = add_reductions(zero_bubble(2, 2))


@pytest.mark.parametrize(("broken", "says"), [
    (replace(TWO, 0, "F0 F1 I0 W0 I1 reduce0 W1"), "rank 0 does reduce0 before W1, whose share"),
    (replace(TWO, 1, "F0 I0 F1 I1 W0 W1"), "rank 1 never reduces bucket 0 of stage 1.*add reduce0 after W1"),
    (replace(TWO, 0, "F0 F1 I0 W0 I1 W1 reduce0 reduce0"), "rank 0 has reduce0 2 times"),
    (replace(add_steps(TWO), 0, "F0 F1 I0 W0 I1 W1 step reduce0"), "stands at step .* waits for reduce0, which comes"),
    (Schedule.parse("gather F0 free B0"), "does B0 .action 3. with parameters that are not gathered: free .action 2."),
    (Schedule.parse("gather F0 gather B0 free"), "has gather as action 2, but stage 0 is gathered already"),
    (Schedule.parse("gather F0 B0"), "never frees stage 0"), (Schedule.parse("free F0 B0"), "is not gathered"),
])
def test_collectives_in_the_wrong_place(broken: Schedule, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        check(broken)


@pytest.mark.parametrize(("call", "says"), [
    (lambda: add_reductions(TWO), "reduce actions already"), (lambda: add_reductions(zb_v(2, 3), [1]), "for 4 stages"),
    (lambda: add_gathers(TWO, 0), "at_once=0"), (lambda: move_later(TWO, Op.F), "F cannot be moved"),
    (lambda: add_messages(add_messages(TWO)), "sends and receives already"),
    (lambda: early_receives(TWO), "call add_messages first"),
])
def test_refusals(call, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        call()


def test_schedules_need_no_torch() -> None:
    code = "import sys, course_lib.schedule, course_lib.simulate.pipeline; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
