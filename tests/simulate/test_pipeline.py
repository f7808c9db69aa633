"""The pipeline simulator: exact where there is a formula, and by hand where there is none."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.link_cost import LinkCost
from course_lib.schedule import (
    Schedule,
    add_messages,
    early_receives,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_v,
    zero_bubble,
)
from course_lib.show import figure
from course_lib.simulate.pipeline import Costs, bubble, ideal_bubble, predict

ms = st.integers(1, 50).map(lambda n: n / 1000)
OFTEN = {"deadline": None, "max_examples": 40}


@settings(**OFTEN)
@given(p=st.integers(1, 6), m=st.integers(1, 12), F=ms, B=ms, make=st.sampled_from([gpipe, one_f_one_b]))
def test_gpipe_and_1f1b_equal_the_formula(p: int, m: int, F: float, B: float, make) -> None:
    found = predict(make(p, m), Costs(F=F, B=B))
    assert round(found.step_s * 1e9) == (m + p - 1) * round((F + B) * 1e9)
    assert found.bubble == pytest.approx(ideal_bubble(p, m), abs=1e-12)


@settings(**OFTEN)
@given(p=st.integers(1, 5), rounds=st.integers(1, 3), v=st.integers(1, 4), F=ms, B=ms)
def test_interleaved_equals_the_formula_where_p_divides_m(p: int, rounds: int, v: int, F: float, B: float) -> None:
    m = p * rounds
    found = predict(interleaved(p, m, v), Costs(F=F, B=B))
    assert round(found.step_s * 1e9) == (v * m + p - 1) * round((F + B) * 1e9)
    assert found.bubble == pytest.approx(ideal_bubble(p, m, v), abs=1e-12)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 5), (3, 7), (4, 8), (5, 11)])
def test_zero_bubble_leaves_a_third_of_the_bubble_with_equal_parts(p: int, m: int) -> None:
    """(p−1)(F + I − W) of idle time a rank instead of (p−1)(F + I + W), arXiv 2401.10241, table 1."""
    equal = Costs(F=0.01, I=0.01, W=0.01)
    assert predict(zero_bubble(p, m), equal).step_s == pytest.approx(m * 0.03 + (p - 1) * 0.01)
    assert predict(one_f_one_b(p, m), equal).step_s == pytest.approx((m + p - 1) * 0.03)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8), (4, 13)])
def test_zb_v_is_never_idle_between_its_first_and_last_action(p: int, m: int) -> None:
    timeline = predict(zb_v(p, m), Costs(F=0.01, I=0.01, W=0.01)).timeline
    for rank in range(p):
        spans = timeline.select(rank=rank, kind="compute").spans
        assert spans[-1].stop - spans[0].start == sum(s.stop - s.start for s in spans) == 6 * m * 10_000_000


def test_one_hop_at_a_time_by_hand() -> None:
    """Two ranks, one micro-batch: F, message, F, B, message, B."""
    found = predict(gpipe(2, 1), Costs(F=0.010, B=0.020, link=LinkCost(0.001, 1e-6), message_bytes=500))
    assert found.step_s == pytest.approx(0.010 + 0.0015 + 0.030 + 0.0015 + 0.020)
    sent = found.timeline.select(rank=0, kind="comm").spans
    assert [(s.name, s.start, s.stop, s.bytes) for s in sent] == [("send_F0", 10_000_000, 11_500_000, 500)]
    assert found.bubble == pytest.approx(1 - 0.060 / (2 * found.step_s))


def test_a_late_receive_holds_the_bytes_up_and_an_early_one_does_not() -> None:
    late = Schedule.parse("F0 send_F0 recv_B0 B0 F1 send_F1 recv_B1 B1\nrecv_F0 F0 B0 send_B0 recv_F1 F1 B1 send_B1")
    costs = Costs(F=0.01, B=0.01, link=LinkCost(0.0, 1e-3), message_bytes=10)
    busy = add_messages(one_f_one_b(2, 3))
    assert predict(early_receives(late), costs).step_s <= predict(late, costs).step_s
    with pytest.raises(ValueError, match="the schedule stops"):
        predict(busy, costs)
    slow = predict(early_receives(busy), costs).timeline.select(rank=0, kind="comm").spans
    assert all(a.stop <= b.start or a.name[5] != b.name[5] for a, b in pairwise(slow))


def test_stages_and_boundaries_may_differ() -> None:
    found = predict(gpipe(3, 1), Costs(F=(0.01, 0.02, 0.03), B=0.0, link=[LinkCost(0.001, 0), LinkCost(0.005, 0)]))
    assert found.step_s == pytest.approx(0.06 + 2 * 0.006)


def test_drawn_above_a_measurement() -> None:
    one, other = (predict(one_f_one_b(2, 3), Costs(F=f, B=0.02)).timeline for f in (0.01, 0.011))
    assert figure(other, predicted=one) is not None


@pytest.mark.parametrize(("costs", "says"), [
    (Costs(F=-1.0), "F of stage 0 costs -1.0 s"), (Costs(F=(1.0, 2.0)), "2 values of F where the schedule has 3"),
    (Costs(F=1.0, link=[LinkCost(0, 0)]), "1 values of link where the schedule has 2"),
])
def test_refusals(costs: Costs, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        predict(gpipe(3, 2), costs)


def test_a_bubble_needs_compute() -> None:
    with pytest.raises(ValueError, match="no compute"):
        bubble(predict(gpipe(1, 1), Costs(F=1.0)).timeline.select(kind="comm"))
