"""The scores against numbers computed by hand."""

import pytest

from course_lib.score import attained, fair_score


def test_fair_score_by_hand():
    score = fair_score(T_serial=300, T=250, Tc=200, Tm=100, spread=5)
    assert (score.name, score.value, score.spread, score.label) == ("F", .5, .05, "")
    assert score.sentence == "F = 0.50 ± 0.05: 50% of the time that the physical limit saves over serial."
    assert fair_score(300, 200, 100, 200).value == 1.0  # max(Tc, Tm), whichever it is
    assert fair_score(300, 300, 200, 100).value == 0
    assert fair_score(300, 310, 200, 100).value == -.1
    assert fair_score(300, 310, 200, 100).sentence == "F = -0.10: slower than serial."


def test_nothing_to_hide_below_five_percent():
    at, below = fair_score(100, 97, 95, 5), fair_score(100, 97, 95.1, 4.9)
    assert at.value == .6 and at.label == ""
    assert below.value is None and below.label == "nothing to hide"
    assert below.sentence.startswith("F: nothing to hide, the physical limit")
    assert attained(100, 99, 96).value is None and attained(100, 99, 101).value is None


def test_below_the_physical_limit_is_impossible_not_good():
    assert fair_score(300, 199, 200, 100).impossible
    assert "Impossible: the step is shorter" in fair_score(300, 199, 200, 100).sentence
    assert not fair_score(300, 199, 200, 100, spread=2).impossible
    assert fair_score(300, 197, 200, 100, spread=2).impossible
    hidden = fair_score(100, 90, 98, 2)  # nothing to hide, and still work is missing
    assert hidden.impossible and hidden.value is None and hidden.label == "nothing to hide"
    assert hidden.sentence.startswith("F: nothing to hide") and "Impossible" in hidden.sentence


def test_attained_by_hand():
    score = attained(T_serial=300, T=220, T_bound=200, spread=10)
    assert (score.name, score.value, score.spread, score.label) == ("A", .8, .1, "")
    assert score.sentence == "A = 0.80 ± 0.10: 80% of the time that the best bucket plan saves over serial."
    assert attained(300, 197, 200).label == ""  # 1.03 exactly
    over = attained(300, 196, 200)
    assert over.value == 1.04 and over.label == "calibration" and "Fit a and β again" in over.sentence


@pytest.mark.parametrize("times", [(0, 1, 1, 1), (1, -1, 1, 1), (1, 1, float("nan"), 1), (1, float("inf"), 1, 1)])
def test_scores_refuse_times_that_cannot_be(times):
    with pytest.raises(ValueError, match="cannot be scored; give positive times of one run"):
        fair_score(*times)
