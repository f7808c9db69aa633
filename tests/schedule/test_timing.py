"""A measured pipeline beside its prediction. How close they are on a quiet machine is for `make bench` to say."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from course_lib import launch, record
from course_lib.schedule import one_f_one_b, zero_bubble
from course_lib.schedule.emulated import EmulatedStage
from course_lib.schedule.execute import Pipeline
from course_lib.schedule.measure import measure_message
from course_lib.show import figure
from course_lib.simulate.pipeline import Costs, bubble, predict
from course_lib.timeline import Timeline

MS, SIZE, M = 10.0, 2**14, 4


def measured(schedules):
    rank, out = dist.get_rank(), []
    for schedule in schedules:
        pipeline = Pipeline(schedule, {rank: EmulatedStage(MS, MS, MS)}, lambda output, _: output.sum())
        window = [(torch.ones(SIZE // 4),)] * M
        pipeline.run(window, 1)
        dist.barrier()
        with record.recording(rank, "measured (real wires, emulated device)") as recorder, recorder.measure_step(0):
            pipeline.run(window, 1)
        out.append(recorder.timeline())
    return measure_message((2**12, SIZE), busy_ms=5, turns=4, repeats=1), out


def test_measured_and_predicted_pipelines_tell_one_story() -> None:
    schedules = [one_f_one_b(2, M), zero_bubble(2, M)]
    found = launch.run(measured, schedules, ranks=2, fabric="paced", timeout_s=60)
    link = found[0][0]
    assert link == found[1][0] and 0 < link.cost(SIZE) < 0.1
    for k, schedule in enumerate(schedules):
        timeline = Timeline.merge(own[k] for _, own in found)
        free = predict(schedule, Costs(*[MS / 1e3] * 3))
        predicted = predict(schedule, Costs(*[MS / 1e3] * 3, link=link, message_bytes=SIZE))
        for rank in range(2):
            device, expected = (t.select(rank=rank, kind="compute") for t in (timeline, predicted.timeline))
            names = list(dict.fromkeys(s.name for s in device))
            assert names == [s.name for s in expected] == [schedule.name(a) for a in schedule.ranks[rank]]
            assert sum(s.stop - s.start for s in device) == sum(s.stop - s.start for s in expected)
        compute = timeline.select(kind="compute")
        took = (max(s.stop for s in compute) - min(s.start for s in compute)) / 1e9
        assert took >= free.step_s and bubble(timeline) >= free.bubble - 1e-9, "faster than free links allow"
        assert predicted.step_s > free.step_s
        sends = timeline.select(rank=0, kind="comm").spans
        assert sum(s.name == "send" for s in sends) == M and {s.bytes for s in sends} == {SIZE}
        assert figure(timeline, predicted=predicted.timeline, step=0) is not None


def test_real_modules_are_timed_by_the_host() -> None:
    rows = launch.run(timed_linear, ranks=1)[0]
    assert [(s.kind, s.lane, s.name) for s in rows] == [("compute", "device", n) for n in ("F0", "B0", "F1", "B1")]
    assert all(a.stop <= b.start for a, b in pairwise(rows.spans))


def timed_linear():
    pipeline = Pipeline(one_f_one_b(1, 2), {0: torch.nn.Linear(64, 64)}, lambda output, _: output.sum())
    with record.recording() as recorder:
        pipeline.run([(torch.ones(8, 64),)] * 2, 1)
    return recorder.timeline()


@pytest.mark.parametrize(("times", "elements"), [((-1.0, 1.0, 1.0), 1), ((1.0, 1.0, 1.0), 0)])
def test_emulated_stages_refuse_what_cannot_be(times, elements) -> None:
    with pytest.raises(ValueError, match=r"0 or more|at least one"):
        EmulatedStage(*times, elements=elements)


def measure_alone():
    with pytest.raises(ValueError, match="one rank sends no messages"):
        measure_message()


def test_a_message_needs_two_ranks() -> None:
    launch.run(measure_alone, ranks=1)
