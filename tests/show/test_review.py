"""The three review figures: their numbers, their words, and what cannot be known."""

from __future__ import annotations

import pytest

from course_lib.show import review
from course_lib.timeline import Span, Timeline


def steps(count: int = 3, compute: bool = True) -> Timeline:
    spans = []
    for rank in (0, 1):
        for k in range(count):
            at = k * 1_000_000
            spans.append(Span(rank, "step", "step", f"step {k}", at, at + 100_000, step=k))
            if compute:
                spans.append(Span(rank, "compute", "device", "forward", at, at + 60_000, step=k))
            spans.append(Span(rank, "comm", "wire", "all_reduce", at + 40_000, at + 100_000, 8, 0, k))
    return Timeline.of(spans, "simulated")


def words(picture) -> list[str]:
    return [t.get_text() for t in picture.texts]


def test_the_numbers_of_a_hand_made_run():
    picture = review(steps(), title="Review")
    assert picture.words == ("Review: communication 60% of the step, exposed 40%; compute busy 60%; "
                             "step time varies by 0.0%.")
    assert "40 %" in words(picture) and "60 %" in words(picture) and "simulated" in words(picture)
    shares, _busy, variation = picture.axes
    heights = [round(bar.get_height(), 6) for bar in shares.patches]
    assert heights == [0.2, 0.4] * 3  # hidden below, exposed above
    assert shares.patches[1].get_hatch()
    assert list(variation.lines[0].get_ydata()) == [0.1, 0.1, 0.1]


def test_without_compute_nothing_is_made_up():
    picture = review(steps(compute=False))
    assert "compute unknown" in picture.words
    assert words(picture).count("unknown") == 2


def test_one_step_has_no_variation():
    assert "one step only" in review(steps(1)).words


def test_without_steps_there_is_nothing_to_review():
    with pytest.raises(ValueError, match="no step spans"):
        review(Timeline.of([Span(0, "comm", "wire", "all_reduce", 0, 5)]))


@pytest.mark.parametrize("dark", [False, True])
def test_it_is_an_image(dark):
    assert review(steps(), dark=dark).png().startswith(b"\x89PNG")
