"""The proof that a schedule runs, and the words in which it refuses one that does not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.schedule import (
    Action,
    Op,
    Schedule,
    ScheduleError,
    add_messages,
    check,
    early_receives,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_v,
    zero_bubble,
)

MAKERS = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": lambda p, m: interleaved(p, m, 2),
          "deep": lambda p, m: interleaved(p, m, 3), "zero bubble": zero_bubble, "zb looped":
          lambda p, m: zero_bubble(p, m, 2), "zb-v": zb_v}


@pytest.mark.parametrize("name", MAKERS)
@settings(deadline=None, max_examples=25)
@given(p=st.integers(1, 6), m=st.integers(1, 13))
def test_every_generator_runs_without_buffers(name: str, p: int, m: int) -> None:
    schedule = MAKERS[name](p, m)
    bare, full = check(schedule), check(early_receives(add_messages(schedule)))
    assert bare.peak_activations == full.peak_activations
    assert sum(bare.sends) == 0 and sum(full.sends) == 2 * m * len(schedule.boundaries)


def test_peak_activations() -> None:
    assert check(gpipe(4, 8)).peak_activations == (8, 8, 8, 8)
    assert check(one_f_one_b(4, 8)).peak_activations == (4, 3, 2, 1)
    assert check(one_f_one_b(4, 2)).peak_activations == (2, 2, 2, 1)
    assert check(zero_bubble(4, 8)).peak_activations == (4, 4, 4, 4)
    assert check(zb_v(4, 8)).peak_activations == (8, 8, 8, 8)  # of half a rank each


def test_the_order_meets_every_need() -> None:
    facts = check(early_receives(add_messages(zero_bubble(3, 5))))
    at = {action: k for k, (_, action) in enumerate(facts.order)}
    for action, k in at.items():
        if action.op in (Op.SEND_F, Op.SEND_B):
            assert at[action.partner()] < k
        if action.op is Op.W:
            assert at[Action(Op.I, action.stage, action.index)] < k


def test_two_neighbours_that_send_first_are_named_with_the_cycle() -> None:
    schedule = Schedule.parse("F0 send_F0 F1 send_F1 recv_B0 B0 recv_B1 B1\n"
                              "recv_F0 F0 B0 send_B0 recv_F1 F1 B1 send_B1")
    with pytest.raises(ScheduleError) as refused:
        check(schedule)
    assert refused.value.cycle == ((0, Action(Op.SEND_F, 0, 1)), (1, Action(Op.SEND_B, 1, 0)))
    text = str(refused.value)
    assert "rank 0 stands at send_F1 (action 3) and waits for rank 1 to post recv_F1" in text
    assert "rank 1 stands at send_B0 (action 3) and waits for rank 0 to post recv_B0" in text
    check(early_receives(schedule))


def test_messages_where_they_are_used_stop_1f1b_but_not_gpipe() -> None:
    check(add_messages(gpipe(4, 8)))
    with pytest.raises(ScheduleError, match="the schedule stops"):
        check(add_messages(one_f_one_b(4, 8)))


def swap(schedule: Schedule, rank: int, a: str, b: str) -> Schedule:
    words = [schedule.name(x) for x in schedule.ranks[rank]]
    i, j = words.index(a), words.index(b)
    words[i], words[j] = words[j], words[i]
    lines = schedule.text().splitlines()
    lines[1 + rank] = " ".join(words)
    return Schedule.parse("\n".join(lines))


def drop(schedule: Schedule, rank: int, word: str) -> Schedule:
    return schedule.with_ranks([[a for a in actions if (r, schedule.name(a)) != (rank, word)]
                                for r, actions in enumerate(schedule.ranks)])


FULL = early_receives(add_messages(one_f_one_b(3, 4)))


@pytest.mark.parametrize(("broken", "says"), [
    (swap(one_f_one_b(2, 3), 1, "F0", "B0"), "rank 1 stands at B0 .action 0. and waits for F0, which comes later on"),
    (swap(zero_bubble(2, 3), 0, "I0", "W0"), "rank 0 stands at W0 .* waits for I0, which comes later on the same"),
    (Schedule.parse("F0 B0 F1 B1\nF1 B1 F0 B0"), "rank 0 stands at B0 .* do B0; rank 1 stands at F1 .* do F1"),
    (swap(FULL, 1, "recv_F0", "recv_F1"), "message 0 from rank 0 to rank 1 is send_F0, but rank 1 expects recv_F1"),
    (drop(FULL, 2, "B3"), "rank 2 lacks B3 for micro-batch 3 of stage 2"),
    (drop(zero_bubble(2, 3), 1, "W2"), "rank 1 lacks W2 for micro-batch 2"),
    (drop(zero_bubble(2, 3), 1, "I2"), "rank 1 lacks I2 for micro-batch 2"),
    (drop(FULL, 1, "recv_B3"), "rank 1 lacks recv_B3"), (drop(FULL, 0, "send_F2"), "rank 0 lacks send_F2"),
    (Schedule.parse("F0 B0 B0"), "rank 0 has B0 2 times"), (Schedule.parse("F0 B0 I0 W0"), "has both B and the I"),
    (Schedule.parse("F0 B0 send_F0\nF0 B0"), "rank 0 lacks recv_B0"),
])
def test_refusals(broken: Schedule, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        check(broken)


@settings(deadline=None, max_examples=60)
@given(st.randoms(use_true_random=False), st.sampled_from(["1f1b", "zero bubble", "zb-v"]))
def test_a_shuffled_schedule_is_refused_or_can_really_be_walked_through(rng: random.Random, name: str) -> None:
    """`check` against a walk that keeps its own account of who has posted and sent what."""
    good = early_receives(add_messages(MAKERS[name](3, 4)))
    ranks = [list(actions) for actions in good.ranks]
    for _ in range(rng.randrange(4)):
        actions = ranks[rng.randrange(3)]
        i = rng.randrange(len(actions) - 1)
        actions[i], actions[i + 1] = actions[i + 1], actions[i]
    schedule = good.with_ranks(ranks)
    try:
        facts = check(schedule)
    except ScheduleError:
        facts = None
    assert (facts is not None) == walks(schedule)


def walks(schedule: Schedule) -> bool:
    """A rank a thread, in words: rendezvous sends, receives posted in order, compute on what has arrived."""
    at, have, posted, arrived = [0] * 3, set(), {}, set()
    last = schedule.stages - 1

    def can(rank: int, a: Action) -> bool:
        s, i = a.stage, a.index
        backward = (Op.B, s, i) in have or (Op.I, s, i) in have
        if a.op in (Op.RECV_F, Op.RECV_B):
            posted.setdefault((schedule.rank_of[a.partner().stage], rank), []).append(a)
            return True
        if a.op in (Op.SEND_F, Op.SEND_B):
            queue = posted.get((rank, schedule.rank_of[a.partner().stage]), [])
            if not ((Op.F, s, i) in have if a.op is Op.SEND_F else backward) or not queue or queue[0] != a.partner():
                return False
            arrived.add(queue.pop(0))
            return True
        if a.op is Op.W:
            return (Op.I, s, i) in have
        if a.op is Op.F:
            before = s > 0 and (Op.F, s - 1, i) in have and schedule.rank_of[s - 1] == rank
            return s == 0 or before or Action(Op.RECV_F, s, i) in arrived
        after = any((op, s + 1, i) in have for op in (Op.B, Op.I)) and s < last and schedule.rank_of[s + 1] == rank
        return (Op.F, s, i) in have and (s == last or after or Action(Op.RECV_B, s, i) in arrived)

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while at[rank] < len(actions) and can(rank, actions[at[rank]]):
                a = actions[at[rank]]
                have.add((a.op, a.stage, a.index))
                at[rank] += 1
                moved = True
    return all(k == len(actions) for k, actions in zip(at, schedule.ranks))
