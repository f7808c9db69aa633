"""The profiler's capture and the light recorder see the same steps."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

from course_lib import overlap
from course_lib.launch import Fabric, run
from course_lib.timeline import Timeline

WIRE = Fabric(gbit=1.0, latency_us=2000, kind="paced")


def capture(trace=None) -> tuple[Timeline, Timeline]:
    from course_lib.record import recording
    from course_lib.train import emulated
    from course_lib.train.bucketed import Bucketed
    from course_lib.train.profiled import profiled, profiled_step
    wrapped = Bucketed(emulated.equal(4, 1, 4, 8), bucket_mb=1, first_bucket_mb=None)

    def step() -> None:
        wrapped.zero_grad(set_to_none=False)
        wrapped(torch.ones(4)).square().mean().backward()
        wrapped.finish_gradient_synchronization()

    step()
    with profiled(trace) as seen, recording(dist.get_rank()) as rec:
        for i in range(3):
            with profiled_step(i), rec.measure_step(i):
                step()
    return seen.timeline(), rec.timeline()


def test_both_count_the_same_collectives_and_bytes():
    for profiler, recorder in run(capture, ranks=2, fabric=WIRE):
        for step in range(3):
            mine, theirs = (_inside(line, step) for line in (recorder, profiler))
            assert [(s.name, s.bytes, s.bucket) for s in theirs] == [(s.name, s.bytes, s.bucket) for s in mine]
            assert [s.bucket for s in mine] == [0, 1, 2, 3]
        assert profiler.provenance == "measured (real wires, emulated device)"


def _inside(line: Timeline, step: int) -> list:
    (window,) = (s for s in line if s.kind == "step" and s.step == step)
    return [s for s in line if s.kind == "comm" and window.start <= s.start < window.stop]


@pytest.mark.timing
def test_both_measure_the_same_times():
    rows = run(capture, ranks=2, fabric=WIRE)
    theirs, ours = (overlap.report(Timeline.merge(r[k] for r in rows)).pooled for k in (0, 1))
    for field in ("span", "comm", "exposed"):  # within a noisy machine's reach; the benchmark holds it to 2 %
        assert getattr(theirs, field) == pytest.approx(getattr(ours, field), abs=0.1 * ours.span), field


def test_the_trace_can_be_read_by_other_tools(tmp_path):
    run(capture, tmp_path / "trace.json", ranks=1, fabric="loopback")
    names = {e["name"] for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if "name" in e}
    assert any(n.startswith("wire::all_reduce bytes=1048576 bucket=") for n in names)
    assert {"course::step 0", "course::step 1", "course::step 2"} <= names
    assert any(n.startswith("emulated::backward") for n in names)


def test_real_compute_is_what_operators_do():
    def real():
        from course_lib.record import recording
        from course_lib.train.phases import Phases
        from course_lib.train.profiled import profiled, profiled_step
        model, x = torch.nn.Linear(1024, 1024), torch.randn(2048, 1024)
        phases = Phases(model)
        for _ in range(3):
            phases.micro_step(lambda: model(x).square().mean())
        with profiled() as seen, recording() as rec, profiled_step(0), rec.measure_step(0):
            phases.micro_step(lambda: model(x).square().mean())
        return seen.timeline(), rec.timeline()

    profiler, recorder = run(real, ranks=1, fabric="loopback")[0]
    theirs, ours = (overlap.report(line).pooled for line in (profiler, recorder))
    assert theirs.comm == 0 and theirs.exposed is None
    assert theirs.compute == pytest.approx(ours.compute, rel=0.15)
