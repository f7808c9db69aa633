"""Each rule finds its cause in a small trace that shows it, and stays silent in one that does not."""

from __future__ import annotations

from collections.abc import Iterable

from trace_samples import ALL_REDUCE, GEMM, event, launched, one_step, step

from course_lib import trace

BACKWARD = "autograd::engine::evaluate_function: MmBackward0"
MS = 1000


def codes(loaded: trace.Trace, **options) -> list[str]:
    return [f.code for f in trace.diagnose(loaded, **options)]


def backward(*kernels: Iterable) -> list:
    """A step of 100 ms whose backward launches a kernel of 40 ms at 10 ms."""
    return [step(1, 0, 100 * MS), event("cpu_op", BACKWARD, 5 * MS, 10 * MS),
            *launched(GEMM, 10 * MS, 40 * MS, 1, at=9 * MS), *(e for k in kernels for e in k)]


def test_a_healthy_trace_has_no_findings(write) -> None:
    assert codes(trace.load(write(backward(launched(ALL_REDUCE, 12 * MS, 20 * MS, 2, stream=20))))) == []


def test_55_communication_after_the_end_of_backward(write) -> None:
    loaded = trace.load(write(backward(launched(ALL_REDUCE, 50 * MS, 30 * MS, 2, stream=20, at=49.9 * MS))))
    found = next(f for f in trace.diagnose(loaded) if f.code == "after-backward")
    assert "only after" in found.says and found.cost == 30_000_000 and "30 ms of 30 ms" in found.evidence


def test_55_the_last_bucket_is_another_matter(write) -> None:
    loaded = trace.load(write(backward(launched(ALL_REDUCE, 12 * MS, 20 * MS, 2, stream=20),
                                       launched(ALL_REDUCE, 50 * MS, 10 * MS, 3, stream=20, at=49.9 * MS))))
    found = next(f for f in trace.diagnose(loaded) if f.code == "after-backward")
    assert "last" in found.says and "smaller" in found.do and "hidden already" in found.do


def test_what_is_exposed_before_the_end_of_backward_is_not_called_hidden(write) -> None:
    events = [step(1, 0, 100 * MS), event("cpu_op", BACKWARD, 5 * MS, 40 * MS), *launched(GEMM, 10 * MS, 5 * MS, 1),
              *launched(ALL_REDUCE, 15 * MS, 20 * MS, 2, stream=20), *launched(GEMM, 40 * MS, 10 * MS, 3),
              *launched(ALL_REDUCE, 50 * MS, 30 * MS, 4, stream=20)]
    found = next(f for f in trace.diagnose(trace.load(write(events))) if f.code == "after-backward")
    assert "30 ms of 50 ms" in found.evidence
    assert "20 ms of 20 ms before that end are exposed as well" in found.do and "hidden already" not in found.do


def test_only_is_said_of_all(write) -> None:
    early = launched(ALL_REDUCE, 12 * MS, 1 * MS, 2, stream=20)
    late = [e for i in range(9) for e in launched(ALL_REDUCE, (50 + 5 * i) * MS, 4 * MS, 3 + i, stream=20)]
    for first, said in ((early, "Most communication starts only after"), ([], "Communication starts only after")):
        found = trace.diagnose(trace.load(write(backward(first, late))))
        assert next(f for f in found if f.code == "after-backward").says.startswith(said)


def test_57_58_launched_early_started_late(write) -> None:
    loaded = trace.load(write(backward(launched(ALL_REDUCE, 45 * MS, 10 * MS, 2, stream=20, at=8 * MS))))
    found = next(f for f in trace.diagnose(loaded) if f.code == "launched-early-started-late")
    assert found.cost == 37_000_000
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in found.do and "TORCH_NCCL_ENABLE_TIMING=1" in found.do


def test_59_different_collectives_in_one_queue(write) -> None:
    gather = "ncclDevKernel_AllGather_RING_LL(x)"
    loaded = trace.load(write(backward(launched(ALL_REDUCE, 12 * MS, 20 * MS, 2, stream=20, at=8 * MS),
                                       launched(gather, 32 * MS, 10 * MS, 3, stream=20, at=8.1 * MS))))
    found = next(f for f in trace.diagnose(loaded) if f.code == "communication-queue")
    assert "all-gather behind all-reduce" in found.evidence


def test_52_a_late_rank_is_named_and_waiting_is_no_transfer(write, tmp_path) -> None:
    for rank, start in enumerate((10, 10, 60)):
        write([step(1, 0, 100 * MS), *launched(GEMM, 1 * MS, (start - 2) * MS, 1),
               *launched(ALL_REDUCE, start * MS, (80 - start) * MS, 2, stream=20)], f"run/rank-{rank}.json")
    loaded = trace.load(tmp_path / "run")
    found = trace.measure(loaded)
    assert found.late == (2,)
    assert trace.waits(found) == {(0, 1): (50_000_000, 20_000_000), (1, 1): (50_000_000, 20_000_000),
                                  (2, 1): (0, 20_000_000)}
    assert next(f for f in trace.diagnose(loaded) if f.code == "late-rank").ranks == (2,)
    assert "clocks" not in codes(loaded)


def test_most_of_the_communication_is_more_than_most_of_what_could_be_matched(write, tmp_path) -> None:
    def says(alone: int) -> str:
        for rank, start in enumerate((100, 150)):
            send = launched("ncclDevKernel_SendRecv(x)", 5 * MS, alone * MS, 3, stream=20) if rank == 0 else []
            write([step(1, 0, 300 * MS), *launched(GEMM, 1 * MS, (start - 2) * MS, 1), *send,
                   *launched(ALL_REDUCE, start * MS, (170 - start) * MS, 2, stream=20)], f"run/rank-{rank}.json")
        return next(f for f in trace.diagnose(trace.load(tmp_path / "run")) if f.code == "late-rank").says

    assert says(10) == "Rank 1 is late: most of what looks like communication on the others is waiting."
    assert says(90) == "Rank 1 is late."


def test_53_ends_that_differ_are_clocks_that_disagree(write, tmp_path) -> None:
    for rank, shift in enumerate((0, 5)):
        write([step(1, 0, 100 * MS), *launched(GEMM, 1 * MS, 8 * MS, 1),
               *launched(ALL_REDUCE, (10 + shift) * MS, 20 * MS, 2, stream=20)], f"run/rank-{rank}.json")
    assert "clocks" in codes(trace.load(tmp_path / "run"))


def host_run(write, *transfers: Iterable[tuple[str, float, float]], compute: float = 5, backward_ms: float = 50,
             **head) -> None:
    """A CPU rank for each list of (name, start, length), in ms of a step of 200 ms; computes at the beginning of each
    10 ms of backward."""
    for rank, mine in enumerate(transfers):
        work = [event("cpu_op", "aten::mm", at * MS, compute * MS) for at in range(0, int(backward_ms), 10)]
        work += [event("cpu_op", BACKWARD, 0, backward_ms * MS, 9)]
        work += [event("user_annotation", name, start * MS, dur * MS, 2) for name, start, dur in mine]
        write([event("user_annotation", "course::step 1", 0, 200 * MS), *work], f"run/rank-{rank}.json",
              distributedInfo={"rank": rank, "world_size": len(transfers), **head})


def ring(first: float, offset: float = 0) -> list[tuple[str, float, float]]:
    return [(f"wire::all_reduce bytes=1000000 bucket={i}", first + 60 * i + offset, 40) for i in range(3)]


def test_53_on_one_host_a_rank_that_leaves_a_ring_sooner_is_no_clock(write, tmp_path) -> None:
    host_run(write, ring(20), ring(37))
    assert "clocks" not in codes(trace.load(tmp_path / "run"))


def test_53_on_hosts_no_rank_leaves_before_another_has_come(write, tmp_path) -> None:
    host_run(write, ring(20), ring(20, offset=43))
    found = next(f for f in trace.diagnose(trace.load(tmp_path / "run")) if f.code == "clocks")
    assert "3 of 3 collectives end on a rank before another has come to them, 3 ms at most" in found.evidence


def test_groups_of_some_ranks_are_not_taken_for_one(write, tmp_path) -> None:
    """Stage 1 reduces its own gradients long before stage 0 does."""
    groups = [{"pg_size": 4, "ranks": [0, 1, 2, 3]}, {"pg_size": 2, "ranks": [0, 1]}, {"pg_size": 1, "ranks": [0]}]
    for given, said in ((groups, False), (groups[::2], True)):
        host_run(write, ring(70), ring(70), ring(20), ring(20), pg_config=given)
        loaded = trace.load(tmp_path / "run")
        assert bool(trace.waits(trace.measure(loaded))) == said and ("clocks" in codes(loaded)) == said


def test_a_wire_that_takes_longer_than_compute_comes_first(write, tmp_path) -> None:
    """Its ring is sends and receives; rank 1 is late to one small all-reduce, which is not what costs."""
    sent = [(f"wire::recv bytes=1000 bucket={i}", 20 + 30 * i, 29) for i in range(5)]
    host_run(write, [*sent, ("wire::all_reduce bytes=4", 171, 9)], [*sent, ("wire::all_reduce bytes=4", 179, 1)])
    loaded = trace.load(tmp_path / "run")
    found = trace.diagnose(loaded)
    assert trace.measure(loaded).late == (1,) and "Late" not in trace.measure(loaded).sentence
    assert found[0].code == "wire-bound"
    assert "292 ms without 8 ms of waiting for late ranks, compute 50 ms" in found[0].evidence
    assert "could not be matched across ranks" in found[0].evidence
    assert "late-rank" not in {f.code for f in found} and "larger N" in found[0].do


def test_a_wire_that_is_behind_when_backward_ends_has_no_last_bucket_to_blame(write, tmp_path) -> None:
    behind = [(f"wire::all_reduce bytes=1000 bucket={i}", 80 + 30 * i, 30) for i in range(3)]
    host_run(write, behind, behind, compute=10, backward_ms=100)
    found = trace.diagnose(trace.load(tmp_path / "run"))
    assert [f.code for f in found] == ["wire-bound"] and "still behind" in found[0].says
    assert "140 ms of communication lie behind" in found[0].evidence and "all but 60 ms" in found[0].evidence


def test_a_wire_that_is_a_little_behind_is_not_passed_over(write, tmp_path) -> None:
    """18 ms a rank are exposed, less than a tenth of the step."""
    behind = [(f"wire::all_reduce bytes=1000 bucket={i}", 78 + 4 * i, 4) for i in range(5)]
    host_run(write, behind, behind, compute=10, backward_ms=80)
    (found,) = trace.diagnose(trace.load(tmp_path / "run"))
    assert found.code == "wire-bound" and "still behind" in found.says


def test_a_small_transfer_behind_the_last_bucket_is_not_the_last(write, tmp_path) -> None:
    """As that of a loss, which many loops send at the end of a step."""
    sent = [("wire::all_reduce bytes=1000 bucket=0", 80, 30), ("wire::all_reduce bytes=2000 bucket=1", 110, 60),
            ("wire::all_reduce bytes=4", 170, 1)]
    host_run(write, sent, sent, compute=10, backward_ms=100)
    (found,) = trace.diagnose(trace.load(tmp_path / "run"))
    assert found.code == "after-backward" and "Make the last bucket smaller" in found.do


def test_receives_of_a_pipeline_may_be_waiting_and_are_no_wall(write, tmp_path) -> None:
    host_run(write, [("wire::recv bytes=1000", 50, 120)], [("wire::recv bytes=1000", 50, 120)])
    assert codes(trace.load(tmp_path / "run")) == []


def test_a_thread_that_receives_between_its_operators_computes(write) -> None:
    """A pipeline's stage receives on the thread that computes; what the receive itself calls is no compute."""
    done = trace.measure(trace.load(write([
        event("user_annotation", "course::step 1", 0, 100), event("cpu_op", "aten::mm", 0, 30),
        event("cpu_op", "gloo:recv", 30, 40), event("cpu_op", "aten::copy_", 50, 5),
        event("cpu_op", "aten::mm", 70, 20), event("user_annotation", "wire::recv bytes=8", 25, 45, 2)]))).pooled
    assert (done.compute, done.comm, done.hidden) == (50_000, 45_000, 5_000)


def test_times_have_no_exponent(write, tmp_path) -> None:
    host_run(write, [("wire::all_reduce bytes=4", 1, 2248)])
    assert "2250 ms" in trace.measure(trace.load(tmp_path / "run")).sentence


def test_a_device_that_waits_for_the_host(write) -> None:
    gaps = [e for i in range(5) for e in launched(GEMM, 20 * MS * i + 10 * MS, 5 * MS, i + 1)]
    found = next(f for f in trace.diagnose(trace.load(write([step(1, 0, 100 * MS), *gaps]))) if f.code == "host-gap")
    assert found.cost == 60_000_000
    busy = [e for i in range(5) for e in launched(GEMM, 20 * MS * i, 15 * MS, i + 1, at=0)]
    assert "host-gap" not in codes(trace.load(write([step(1, 0, 100 * MS), *busy])))


def test_50_a_profile_that_is_slower_than_the_step(write) -> None:
    loaded = trace.load(write(backward()))
    assert "profiler-overhead" in codes(loaded, unprofiled_ms=30)
    assert "profiler-overhead" not in codes(loaded, unprofiled_ms=49)
    many = [event("cpu_op", "aten::add", 10 * i, 5, 3) for i in range(9000)]
    cpu_only = trace.load(write([step(1, 0, 100 * MS), *many]))
    assert "profiler-overhead" in codes(cpu_only)


def test_findings_of_one_step_only(write) -> None:
    second = one_step(5000)
    second[0]["name"] = "ProfilerStep#2"
    found = trace.measure(trace.load(write(one_step() + second)), step=2)
    assert [r.step for r in found.rows] == [2]
