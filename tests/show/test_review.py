"""The three review figures: their numbers, their words, and what cannot be known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest

from course_lib.overlap import report
from course_lib.show import review
from course_lib.timeline import Span, Timeline


def steps(count: int = 3, compute: bool = True, ranks: int = 2) -> Timeline:
    spans = []
    for rank in range(ranks):
        for k in range(count):
            at = k * 1_000_000
            spans.append(Span(rank, "step", "step", f"step {k}", at, at + 100_000, step=k))
            if compute:
                spans.append(Span(rank, "compute", "device", "forward", at, at + 60_000, step=k))
            spans.append(Span(rank, "comm", "wire", "all_reduce", at + 40_000, at + 100_000, 8, 0, k))
    return Timeline.of(spans, "simulated")


def words(picture) -> list[str]:
    return [t.get_text() for t in picture.texts]


def bars(patch) -> list[tuple[float, float]]:
    """Bottom and top of each bar of a row of them, between which are gaps."""
    tops, _edges, bottoms = patch.get_data()
    assert np.isnan(tops[1::2]).all()
    return [(round(low, 6), round(high, 6)) for low, high in zip(bottoms[::2], tops[::2], strict=True)]


class Counted(tuple):
    """A table that counts how many of its rows were looked at."""

    looks = 0

    def __iter__(self) -> Iterator:
        for row in super().__iter__():
            self.looks += 1
            yield row


def test_the_numbers_of_a_hand_made_run():
    picture = review(steps(), title="Review")
    assert picture.words == ("Review: communication 60% of the step, exposed 40%; compute busy 60%; "
                             "step time varies by 0.0%.")
    assert "40 %" in words(picture) and "60 %" in words(picture) and "simulated" in words(picture)
    shares, _busy, variation = picture.axes
    assert bars(shares.patches[0]) == [(0.0, 0.2)] * 3  # hidden below, exposed above
    assert bars(shares.patches[1]) == [(0.2, 0.6)] * 3 and shares.patches[1].get_hatch()
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


@pytest.mark.parametrize(("count", "ranks"), [(3, 2), (100, 2), (3, 40)])
def test_long_runs_of_many_ranks_are_read_a_few_times_and_drawn_with_few_patches(count, ranks, monkeypatch):
    line = steps(count, ranks=ranks)
    found = replace(report(line), rows=Counted(report(line).rows))
    monkeypatch.setattr(import_module("course_lib.show.review"), "report", lambda _: found)
    watched = Timeline(Counted(line.spans), line.provenance)
    picture = review(watched)
    assert found.rows.looks <= 4 * len(found.rows)
    assert watched.spans.looks <= 4 * len(watched.spans)
    assert [len(axes.patches) for axes in picture.axes] == [2, 2, 0]


@pytest.mark.parametrize("dark", [False, True])
def test_it_is_an_image(dark):
    assert review(steps(), dark=dark).png().startswith(b"\x89PNG")
