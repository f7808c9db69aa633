"""Every exercise of every lab: well formed, and each planted wrong answer rejected with the hint written for it."""

from __future__ import annotations

import pytest

from course_lib.lab import evaluate
from course_lib.lab.model import Exercise, Planted
from course_lib.lab.registry import everything

EXERCISES = list(everything().values())
PLANTED = [(each, planted) for each in EXERCISES for planted in each.planted]
SEEDS = range(20)


@pytest.mark.parametrize("each", EXERCISES, ids=lambda each: each.id)
def test_is_well_formed(each: Exercise) -> None:
    assert 0 < each.minutes <= 60
    assert len(each.hints) == 3 and all(len(hint) > 20 for hint in each.hints)
    assert len(each.planted) >= 2
    assert {planted.mistake for planted in each.planted} == set(each.mistakes), "every hint has its planted answer"


@pytest.mark.parametrize(("each", "planted"), PLANTED, ids=lambda value: getattr(value, "id", None) or value.name)
def test_planted_answer_is_rejected_with_its_hint(each: Exercise, planted: Planted) -> None:
    for seed in SEEDS:
        result = evaluate(each.id, planted.answer(each.needs), seed=seed)
        assert not result.ok
        assert result.mistake == planted.mistake, f"seed {seed}"
        assert result.diagnosis == each.mistakes[planted.mistake]
        assert all(row.expected and row.seen for row in result.rows if not row.ok)
