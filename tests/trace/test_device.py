"""Device events: what counts, in which step, and as what. Numbers refer to `cases/traces.md`."""

from __future__ import annotations

import pytest
from trace_samples import ALL_REDUCE, GEMM, event, kernel, launch, launched, one_step, step

from course_lib import trace
from course_lib.trace.events import Event, Events
from course_lib.trace.steps import OUTSIDE, find_steps


def codes(loaded: trace.Trace) -> dict[str, int]:
    return {note.code: note.count for _, note in loaded.notes}


def pooled(loaded: trace.Trace):
    return trace.measure(loaded).pooled


def comm(loaded: trace.Trace):
    return [s for s in loaded.timeline if s.kind == "comm"]


def test_12_whole_microseconds_overlap_by_one_and_that_is_nothing(write) -> None:
    """Also 42: kernels that really overlap on one stream are all kept, united and counted."""
    kernels = [kernel("a", 10, 11, 1), kernel("b", 20, 10, 2), kernel("c", 25, 10, 3)]
    loaded = trace.load(write([step(1, 0, 1000), *kernels]))
    assert codes(loaded)["overlaps"] == 1
    assert pooled(loaded).compute == 25_000


@pytest.mark.parametrize("name", [ALL_REDUCE, "NCCL_all", "ncclKernel_AllReduce", "ncclSymkDevKernel_AllGather"])
def test_18_19_nccl_under_every_name(write, name: str) -> None:
    loaded = trace.load(write([step(1, 0, 1000), *launched(GEMM, 100, 400, 1), *launched(name, 300, 400, 2, stream=9)]))
    assert pooled(loaded).hidden == 200_000


def test_20_28_host_annotations_are_no_transfer(write) -> None:
    loaded = trace.load(write([step(1, 0, 1000), event("user_annotation", "nccl:all_reduce", 100, 300),
                               event("cpu_op", "aten::mm", 0, 90)]))
    assert "no-device-events" in codes(loaded)
    row = pooled(loaded)
    assert (row.comm, row.compute, row.overlap) == (None, None, None)
    assert trace.diagnose(loaded)[0].code == "no-device-events"


def test_28_launched_collectives_whose_kernels_are_missing_are_unknown(write) -> None:
    loaded = trace.load(write([step(1, 0, 1000), event("user_annotation", "nccl:all_reduce", 100, 30),
                               *launched(GEMM, 100, 400, 1)], distributedInfo={"rank": 0, "world_size": 8}))
    assert pooled(loaded).comm is None and pooled(loaded).compute == 400_000


def test_28_a_world_of_one_really_sends_nothing(write) -> None:
    loaded = trace.load(write([step(1, 0, 1000), event("user_annotation", "nccl:all_reduce", 100, 30),
                               *launched(GEMM, 100, 400, 1)], distributedInfo={"rank": 0, "world_size": 1}))
    assert pooled(loaded).comm == 0


def test_21_29_collectives_are_described_by_id_and_then_by_order(write) -> None:
    call = {"Collective name": "allreduce", "In msg nelems": 8, "Out msg nelems": 8, "dtype": "BFloat16",
            "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
    generic = "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"
    events = [step(1, 0, 1000), event("cpu_op", "record_param_comms", 5, 10, **{"External id": 77, **call}),
              event("cpu_op", "record_param_comms", 50, 10, **call | {"Collective name": "_allgather_base"}),
              launch(1, 8, "hipExtLaunchKernel", **{"External id": 77}), kernel(generic, 20, 30, 1, stream=4),
              launch(2, 55, "hipExtLaunchKernel"), kernel(generic, 60, 30, 2, stream=4)]
    loaded = trace.load(write(events))
    assert [(s.name, s.bytes) for s in comm(loaded)] == [("all-reduce in group 0 [0, 1]", 16),
                                                         ("all-gather in group 0 [0, 1]", 16)]
    undescribed = trace.load(write([*events, *launched(generic, 100, 30, 3, stream=4)]))
    assert [s.name for s in comm(undescribed)][1:] == ["unknown collective (ncclDevKernel_Generic)"] * 2
    assert codes(undescribed)["undescribed"] == 2


def test_22_custom_all_reduce_is_communication_without_bytes(write) -> None:
    custom = launched("void vllm::cross_device_reduce_1stage<float, 8>(x)", 100, 20, 1)
    loaded = trace.load(write([step(1, 0, 1000), *custom]))
    assert [s.bytes for s in comm(loaded)] == [-1]


def test_24_copies_to_a_peer_under_a_collective_are_communication(write) -> None:
    def copy(name: str, ts: float, correlation: int):
        return [launch(correlation, ts - 10, "cudaMemcpyAsync"),
                event("gpu_memcpy", name, ts, 50, 9, stream=9, correlation=correlation, device=0)]

    loaded = trace.load(write([step(1, 0, 1000), event("cpu_op", "symm_mem::all_gather", 80, 30),
                               *copy("Memcpy PtoP (Device -> Device)", 100, 1),
                               *copy("Memcpy PtoP (Device -> Device)", 300, 2),
                               *copy("Memcpy DtoD (Device -> Device)", 500, 3)]))
    assert [s.kind for s in loaded.timeline if s.kind in ("comm", "copy")] == ["comm", "copy", "copy"]
    assert codes(loaded)["peer-copy"] == 1


def test_26_multimem_on_the_compute_stream_cannot_overlap(write) -> None:
    loaded = trace.load(write([step(1, 0, 1000), *launched(GEMM, 100, 400, 1),
                               *launched("multimem_all_reduce_kernel", 500, 100, 2)]))
    assert pooled(loaded).cannot_overlap == "stream 7" and pooled(loaded).hidden == 0
    assert "same-stream" in [f.code for f in trace.diagnose(loaded)]


def test_27_43_49_annotations_waits_and_overhead_are_no_work(write) -> None:
    plain = pooled(trace.load(write(one_step())))
    loaded = trace.load(write([
        *one_step(), event("gpu_user_annotation", "nccl:all_reduce", 300, 600, 20, stream=20),
        event("cuda_sync", "Stream Sync", 700, 200, 1000007, stream=7, correlation=9),
        event("overhead", "Buffer Flush", 710, 100, 0)]))
    assert pooled(loaded) == plain
    assert loaded.ranks[0].facts.overhead == {1: 100_000}
    assert "profiler-overhead" in [f.code for f in trace.diagnose(loaded)]


def test_37_activity_was_requested_and_none_recorded(write) -> None:
    loaded = trace.load(write([step(1, 0, 1000), *(launch(i, 10 * i, "hipLaunchKernel") for i in range(9))]))
    note = next(n for _, n in loaded.notes if n.code == "no-device-events")
    assert "requested" in note.text and pooled(loaded).compute is None


@pytest.mark.parametrize(("early", "noted"), [(40, False), (60, True)])
def test_38_a_kernel_may_start_before_its_launch(write, early: int, noted: bool) -> None:
    loaded = trace.load(write([step(1, 0, 1000), *launched(GEMM, 500, 100, 1, at=500 + early)]))
    assert ("early" in codes(loaded)) is noted and pooled(loaded).compute == 100_000


def test_39_any_runtime_call_is_a_launch(write) -> None:
    events = [step(1, 0, 100), step(2, 100, 100), event("cuda_driver", "cuLaunchKernelEx", 50, 2, correlation=5),
              kernel(ALL_REDUCE, 150, 20, 5, stream=20)]
    assert [s.step for s in comm(trace.load(write(events)))] == [1]


def test_32_nothing_needs_to_be_there(write) -> None:
    bare = {"ph": "X", "cat": "kernel", "name": GEMM, "ts": 10, "dur": 5, "pid": 0, "tid": 7}
    assert pooled(trace.load(write([bare]))).compute == 5_000


def test_44_47_steps_that_cross_or_repeat(write) -> None:
    crossing = trace.load(write([step(1, 0, 150), step(2, 100, 100), kernel(GEMM, 120, 10, 1)]))
    assert "steps-cross" in codes(crossing)
    assert [s.step for s in crossing.timeline if s.kind == "compute"] == [2]
    repeated = trace.load(write([step(1, 0, 100), step(1, 200, 100)]))
    assert "step-numbers" in codes(repeated) and repeated.timeline.steps == [0, 1]
    two_threads = trace.load(write([step(1, 0, 100), event("user_annotation", "ProfilerStep#1", 2, 90, 2)]))
    assert two_threads.timeline.steps == [1] and "step-numbers" not in codes(two_threads)


def test_45_launches_without_kernels_make_a_step_incomplete(write) -> None:
    loaded = trace.load(write([*one_step(), launch(50, 800), launch(51, 810)]))
    assert codes(loaded)["incomplete-step"] == 2 and loaded.ranks[0].facts.missing == {1: 2}


def test_46_kernels_of_the_warm_up_belong_to_no_step(write) -> None:
    early = [kernel(GEMM, 10 + 2 * i, 1, 1 + i) for i in range(30)]
    loaded = trace.load(write([step(1, 0, 1000), *early, *(e for i in range(10) for e in
                                                          launched(GEMM, 200 + 10 * i, 5, 100 + i))]))
    assert codes(loaded)["foreign"] == 30
    assert pooled(loaded).compute == 50_000
    assert sum(s.step == OUTSIDE for s in loaded.timeline) == 30


def test_48_graphs_count_by_time(write) -> None:
    events = [step(1, 0, 100), step(2, 100, 100), launch(5, 50, "cudaGraphLaunch"), kernel(GEMM, 60, 10, 5),
              kernel(GEMM, 150, 10, 5)]
    loaded = trace.load(write(events))
    assert [s.step for s in loaded.timeline if s.kind == "compute"] == [1, 2] and codes(loaded)["graph"] == 2


def test_kernels_belong_to_the_step_that_launched_them(write) -> None:
    events = [step(1, 0, 100), step(2, 100, 100), *launched(GEMM, 150, 30, 1, at=90),
              *launched(GEMM, 190, 30, 2, at=110)]
    found = trace.measure(trace.load(write(events)))
    assert [(r.step, r.span, r.compute) for r in found.rows] == [(1, 180_000, 30_000), (2, 120_000, 30_000)]


def test_what_is_no_correlation_links_nothing(write) -> None:
    """A tracer that does not know writes -1 or 0; that is no launch of long ago, nor a number."""
    for unknown in (-1, 0, "--5", "²", "9" * 5000, None, [1]):
        loaded = trace.load(write([step(1, 0, 1000), launch(1, 90), kernel(GEMM, 100, 400, unknown)]))
        (row,) = trace.measure(loaded).rows
        assert (row.step, row.compute) == (1, 400_000), unknown


def test_an_event_behind_a_step_inside_another_is_in_the_outer_one(write) -> None:
    row = trace.measure(trace.load(write([step(1, 0, 1000), step(2, 100, 100), *launched(GEMM, 500, 50, 1)]))).rows[0]
    assert (row.step, row.compute) == (1, 50_000)


def test_several_devices_in_one_file_are_said_to_be_one_rank(write) -> None:
    other = {**kernel(ALL_REDUCE, 100, 400, 2), "args": {"device": 1, "stream": 7, "correlation": 2}}
    assert codes(trace.load(write([step(1, 0, 1000), *launched(GEMM, 100, 400, 1), other])))["devices"] == 2
    assert "devices" not in codes(trace.load(write(one_step())))


def test_steps_are_found_in_time_that_grows_with_their_number() -> None:
    """Counted, not timed: comparing each step with all before it would take two million looks."""
    looks = 0

    class Counted(int):
        def __lt__(self, other: int) -> bool:
            nonlocal looks
            looks += 1
            return int(self) < int(other)

        def __ge__(self, other: int) -> bool:
            nonlocal looks
            looks += 1
            return int(self) >= int(other)

    marks = [Event(f"ProfilerStep#{i}", "annotation", Counted(i * 10), Counted(i * 10 + 9), (1, 1), {})
             for i in range(2000)]
    steps, notes = find_steps(Events(annotations=marks), truncated=False)
    assert len(steps.windows) == 2000 and not notes and looks < 100_000
