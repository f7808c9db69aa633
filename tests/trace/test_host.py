"""Ranks that compute on the CPU or on an emulated device, and the course's own labels."""

from __future__ import annotations

import pytest
from trace_samples import event, step

from course_lib import trace

MATMUL = [event("cpu_op", "aten::linear", 0, 100), event("cpu_op", "aten::mm", 5, 90),
          event("cpu_op", "aten::resolve_conj", 6, 1), event("cpu_op", "aten::add_", 200, 50)]


def test_leaf_operators_leave_a_matrix_product_out_and_say_so(write) -> None:
    loaded = trace.load(write([step(1, 0, 1000), *MATMUL]))
    assert trace.measure(loaded).pooled.compute == 51_000
    assert [n.code for _, n in loaded.notes] == ["leaf-operators"]


def test_outer_operators_include_what_they_call(write) -> None:
    node = event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 300, 100)
    path = write([step(1, 0, 1000), node, *MATMUL])
    assert trace.measure(trace.load(path, cpu="outer")).pooled.compute == 150_000


def test_our_own_capture_is_read_as_it_was_measured(write) -> None:
    loaded = trace.load(write([
        event("user_annotation", "course::step 0", 0, 1000), *MATMUL,
        event("user_annotation", "wire::all_reduce bytes=4096 bucket=2", 50, 170, 9),
        event("user_annotation", "gloo:all_reduce", 60, 10, 10), event("cpu_op", "aten::copy_", 60, 10, 9)]))
    wire = [s for s in loaded.timeline if s.kind == "comm"]
    assert [(s.name, s.lane, s.bytes, s.bucket) for s in wire] == [("all_reduce", "wire", 4096, 2)]
    row = trace.measure(loaded).pooled
    assert (row.compute, row.comm, row.hidden) == (150_000, 170_000, 70_000)
    assert loaded.timeline.provenance == "measured (cpu)" and loaded.timeline.steps == [0]


def test_an_emulated_device_is_all_the_compute_there_is(write) -> None:
    loaded = trace.load(write([
        event("user_annotation", "course::step 0", 0, 1000), *MATMUL,
        event("user_annotation", "emulated::layer 3", 300, 200),
        event("user_annotation", "wire::all_reduce bytes=4096", 400, 200, 9)]))
    assert [(s.name, s.lane) for s in loaded.timeline if s.kind == "compute"] == [("layer 3", "device")]
    assert trace.measure(loaded).pooled.hidden == 100_000
    assert loaded.timeline.provenance == "measured (real wires, emulated device)"


def test_gloo_has_bytes_where_shapes_were_recorded(write) -> None:
    shape = {"Input Dims": [[3, 5]], "Input type": ["c10::Half"]}
    loaded = trace.load(write([step(1, 0, 1000), event("user_annotation", "gloo:all_reduce", 10, 90, 2, **shape),
                               event("user_annotation", "gloo:all_reduce", 20, 90, 3), *MATMUL]))
    wire = [s for s in loaded.timeline if s.kind == "comm"]
    assert [(s.lane, s.bytes) for s in wire] == [("gloo 0", 30), ("gloo 1", -1)]
    assert trace.measure(loaded).pooled.comm == 100_000


def test_a_step_lasts_until_the_host_ends_it(write) -> None:
    found = trace.measure(trace.load(write([step(1, 0, 1000), *MATMUL])))
    assert found.rows[0].span == found.pooled.span == 1_000_000 and found.step_times == (1_000_000,)


def test_the_live_capture_and_its_file_agree(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    from course_lib.timeline import length, union
    from course_lib.train.profiled import profiled, profiled_step

    a = torch.rand(64, 64)
    with profiled(tmp_path / "rank-0.json") as capture, profiled_step(0):
        for _ in range(20):
            a = (a @ a).softmax(-1)
    live, file = (length(union(t.select(kind="compute").intervals()))
                  for t in (capture.timeline(), trace.read(tmp_path / "rank-0.json")))
    assert file == pytest.approx(live, rel=1e-3)
