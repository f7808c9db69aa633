"""The page of `course trace --html` says what the table says."""

from __future__ import annotations

import re
from importlib import import_module

import pytest
from trace_samples import event

from course_lib import trace
from course_lib.show import review

page_module = import_module("course_lib.trace.page")


@pytest.fixture
def loaded(write) -> trace.Trace:
    """Steps 2, 3, 4 of a CPU rank that ends each with 400, 300, 200 us in which no operator runs."""
    events = [e for k in (2, 3, 4) for e in (
        event("user_annotation", f"ProfilerStep#{k}", 2000 * k, 1000), event("cpu_op", "aten::mm", 2000 * k, 500),
        event("cpu_op", "gloo:all_reduce", 2000 * k + 300, 100 * k + 100, 2))]
    return trace.load(write(events))


@pytest.fixture
def drawn(loaded, monkeypatch) -> dict[str, list]:
    """What the page draws: the review pictures, and the steps that the figures are of."""
    seen: dict[str, list] = {"reviews": [], "steps": []}

    def keep(timeline, **options):
        seen["reviews"].append(review(timeline, **options))
        return seen["reviews"][-1]

    def step_of(timeline, *, step):
        seen["steps"].append(step)
        raise ValueError("nothing to draw")

    monkeypatch.setattr(page_module, "review", keep)
    monkeypatch.setattr(page_module, "figure", step_of)
    return seen


def numbers(axes) -> list[str]:
    return [label.get_text() for label in axes.get_xticklabels()]


@pytest.mark.parametrize("step", [None, 3])
def test_the_panels_have_the_steps_and_times_of_the_table(loaded, drawn, step) -> None:
    found = trace.measure(loaded, step)
    page_module.page(loaded, found, (), step)
    (picture,), every = drawn["reviews"], trace.measure(loaded)
    shares, _busy, variation = picture.axes
    assert numbers(shares) == numbers(variation) == [str(row.step) for row in every.rows] == ["2", "3", "4"]
    assert list(variation.lines[0].get_ydata()) == [row.span / 1e6 for row in every.rows] == [1.0, 1.0, 1.0]
    assert drawn["steps"] == [3]


def test_no_number_of_the_table_is_broken_in_two(loaded) -> None:
    text = page_module.page(loaded, trace.measure(loaded), ())
    assert "<td>50.00 %</td>" in text
    cells = re.search(r"^td, th \{(.*)\}$", text, re.MULTILINE)
    assert cells and "white-space: nowrap" in cells[1]
