"""The measurement on real ranks: right reducers pass, and what is too cheap is as wrong as what is too slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from course_lib.grade import measure
from course_lib.grade.measure import Measurement
from course_lib.grade.outcome import Part
from course_lib.grade.template import Submission, Template
from course_lib.timeline import Timeline

Make = Callable[..., Submission]
RIGHT = [Part(number, "", "ok", 10.0, 10.0) for number in ("4.1", "4.2", "4.3")]


def _measurement(own: float, score: float, doubt: float = 0.05) -> Measurement:
    seconds = {"own": own, "serial": 0.7, "comm": 0.27, "compute": 0.42, "given": 0.42}
    return Measurement(seconds, 0.01, score, doubt, 0.8, None, Timeline())


def test_a_verdict_needs_a_margin_and_a_possible_time() -> None:
    assert measure._verdict(_measurement(0.45, 0.85)).outcome == "ok"
    late = measure._verdict(_measurement(0.72, -0.1))
    assert (late.outcome, late.points) == ("failed_checks", 0.0)
    impossible = measure._verdict(_measurement(0.30, 1.5))
    assert (impossible.outcome, impossible.points) == ("impossible", None)
    unstable = measure._verdict(_measurement(0.60, 0.35, doubt=0.1))
    assert (unstable.outcome, unstable.points) == ("timing_unstable", None)


def test_nothing_is_measured_before_its_exercises_are_right(template: Template, submission: Make) -> None:
    parts = [replace(RIGHT[0], outcome="failed_checks"), *RIGHT[1:]]
    found = measure.judge(template, submission(), parts, seed=1)
    assert (found.part.outcome, found.part.points, found.measurement) == ("failed_checks", 0.0, None)


@pytest.mark.slow
def test_the_solution_hides_its_communication(template: Template, submission: Make) -> None:
    found = measure.judge(template, submission(), RIGHT, seed=1)
    assert found.part.outcome in ("ok", "timing_unstable"), found.part
    facts = found.measurement.facts
    assert 0.98 < facts["bytes_sent"] / 2**24 < 1.1
    assert facts["bytes_by"] == ("kernel" if facts["fabric"] == "shaped" else "wire")
    assert found.measurement.timeline.ranks == [0, 1]
    assert len(found.measurement.expected)


SENDS_NOTHING = """
import torch.distributed
class Work:
    def wait(self, *a): return True
    def is_completed(self): return True
torch.distributed.all_reduce = lambda *a, **k: Work()
"""
HALF = """
import torch.distributed
_real = torch.distributed.all_reduce
def _half(tensor, *a, **k):
    return _real(tensor[: tensor.numel() // 2], *a, **k)
torch.distributed.all_reduce = _half
"""


@pytest.mark.slow
@pytest.mark.parametrize("trick", [SENDS_NOTHING, HALF], ids=["sends nothing", "sends half"])
def test_bytes_that_are_not_sent_are_missed(template: Template, submission: Make, sources: dict, trick: str) -> None:
    found = measure.judge(template, submission({"4.3": sources["4.3"] + trick}), RIGHT, seed=1)
    assert found.part.outcome == "failed_checks"
    assert "Too few bytes" in found.part.sentence


@pytest.mark.slow
def test_a_device_that_is_sped_up_is_impossible(template: Template, submission: Make, sources: dict) -> None:
    trick = "\nfrom course_lib.train.emulated import device\ntype(device).spend = lambda self, name, ns: None\n"
    found = measure.judge(template, submission({"4.3": sources["4.3"] + trick}), RIGHT, seed=1)
    assert (found.part.outcome, found.part.points) == ("impossible", None)


@pytest.mark.slow
def test_a_reducer_that_only_pretends_on_real_ranks_is_told_what_is_missing(
    template: Template, submission: Make, sources: dict
) -> None:
    trick = """
_real = Reducer.on_gradient_ready
def _lazy(self, index):
    if not hasattr(self.wire, "memory"):
        _real(self, index)
Reducer.on_gradient_ready = _lazy
"""
    found = measure.judge(template, submission({"4.2": sources["4.2"] + trick}), RIGHT, seed=1)
    assert found.part.outcome == "failed_checks"
    assert "did not launch" in found.part.sentence
