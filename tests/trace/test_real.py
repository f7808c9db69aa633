"""Traces of other people's jobs, against numbers that were computed independently."""

from __future__ import annotations

import gzip
import json
import time
from decimal import Decimal

import numpy as np
import pytest

from course_lib import overlap, trace
from course_lib.timeline import intersect, length, subtract, union
from course_lib.trace.classify import is_communication

DDP = "hta/nccl_data_a100_r0of2/nccl_data.json.gz"
DIFF = "hta/trace_diff_control_a100_r3of8/control.json.gz"
MI300 = "tracelens/mi300_ddp_resnet_actckpt_r0of8/resnet_act_checkpoint.json.gz"
OLD_SCHEMA = "kineto_tb/resnet50_workers0_v100_oldschema/worker0.1623143089861.pt.trace.json.gz"
V100 = "hta/ns_resolution_v100_ws1/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz"
DEVICE = (
    DDP, DIFF, MI300, OLD_SCHEMA,
    "hta/torchrec_sampled_r0r1of128/sampled_rank-0.json.gz", "hta/torchrec_sampled_r0r1of128/sampled_rank-1.json.gz",
    "hta/alexnet_cuda_sync_a100/benchmark_result_2869224_1695835535_trace.json.gz",
    "hta/mi250_minitoy_rocm62/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "hta/triton_example_a100/triton_example.json.gz",
    "hta/large_integer_r70/rank-70.Mar_25_20_48_12.2861.pt.trace.json.gz",
    "hta/trace_compare_dup_rank/base.json.gz", "hta/trace_compare_dup_rank/test.json.gz",
    "kineto_docs/sync_link_fix_h100/before_fix_trace.json", "kineto_docs/sync_link_fix_h100/after_fix_trace.json",
    "tracelens/h100_bert_small/gaunernst_bert-small-uncased__1016001.json.gz",
    *(f"astra_sim/megatron_tp8_a100/megatron_kineto_{rank}.json" for rank in range(8)),
)
# The independent numbers add microseconds as doubles and lose up to 72 ns over a file; exact decimals agree with ours
# (`test_nanoseconds_are_those_of_exact_decimals`).
NANOSECONDS = 100


def cover(timeline, *kinds: str) -> np.ndarray:
    return union(np.array([(s.start, s.stop) for s in timeline if s.kind in kinds], np.int64).reshape(-1, 2))


@pytest.mark.parametrize("key", DEVICE)
def test_device_times_of_the_whole_file(real, expected, key: str) -> None:
    timeline, want = real(key).timeline, expected[key]
    compute, comm, copies = (cover(timeline, *kinds) for kinds in (("compute",), ("comm",), ("copy", "memset")))
    busy = cover(timeline, *overlap.WORK)
    found = {
        "comp_us": length(compute), "comm_us": length(comm), "mem_us": length(copies),
        "overlap_us": length(intersect(comm, compute)), "exposed_us": length(subtract(comm, compute)),
        "exposed_strict_us": length(subtract(subtract(comm, compute), copies)),
    }
    names = want["wide_names"]
    assert {k: v / 1e3 for k, v in found.items()} == {
        k: pytest.approx(names[k], abs=NANOSECONDS / 1e3) for k in found}
    assert length(busy) / 1e3 == pytest.approx(want["busy_us"], abs=NANOSECONDS / 1e3)
    assert (busy[-1, 1] - busy[0, 0]) / 1e3 == pytest.approx(want["span_us"], abs=NANOSECONDS / 1e3)
    assert sum(s.kind == "comm" for s in timeline) == names["n_comm"]
    assert sorted({s.lane.removeprefix("stream ") for s in timeline if s.kind == "comm"}) == names["comm_streams"]
    assert [f"ProfilerStep#{n}" for n in timeline.steps] == sorted(want["steps"], key=lambda s: int(s.split("#")[1]))


def test_nanoseconds_are_those_of_exact_decimals(real, folder) -> None:
    events = json.loads(gzip.decompress((folder / DDP).read_bytes()), parse_float=Decimal)["traceEvents"]
    for kinds, cats in ((("compute", "comm"), ("kernel",)), (("copy", "memset"), ("gpu_memcpy", "gpu_memset"))):
        exact = sum(int(e["dur"] * 1000) for e in events if e.get("cat") in cats)
        assert sum(s.stop - s.start for s in real(DDP).timeline if s.kind in kinds) == exact


@pytest.mark.parametrize(("key", "percent"), [(DDP, 15.61), (DIFF, 46.24), (MI300, 22.22)])
def test_overlap_where_other_analysers_are_off(real, key: str, percent: float) -> None:
    assert round(100 * real(key).ranks[0].whole().overlap, 2) == percent


def test_absolute_times_with_a_fraction_stay_exact(real, expected) -> None:
    """A double keeps a quarter of a microsecond of these; the independent numbers show it, ours do not."""
    row, want = real(V100).ranks[0].whole(), expected[V100]["wide_names"]
    assert row.compute / 1e3 == pytest.approx(want["comp_us"], rel=1e-4)
    assert row.comm == 0 and row.hidden is None


@pytest.mark.parametrize("rank", [0, 1])
def test_gloo_on_the_cpu(real, expected, rank: int) -> None:
    key = f"selfmade_gloo/ddp/rank{rank}.pt.trace.json"
    loaded, want = real(key), expected[key]["cpu"]
    found = trace.measure(loaded)
    row = found.pooled
    assert loaded.timeline.ranks == [rank]
    assert row.compute / 1e3 == pytest.approx(want["leaf_compute_us"], abs=0.05)
    assert row.comm / 1e3 == pytest.approx(want["comm_us"], abs=0.05)
    assert [r.span / 1e3 for r in found.rows] == [pytest.approx(us, abs=0.05) for us in want["step_us"]]
    assert round(100 * row.overlap, 2) == want["overlap_pct_leaf"]
    assert round(100 * row.share, 2) == want["comm_share_of_steps_pct"]
    assert round(100 * row.exposed / row.span, 2) == want["exposed_pct_of_steps"]
    assert len({s.lane for s in loaded.timeline if s.kind == "comm"}) == want["gloo_threads"]
    assert any(note.code == "leaf-operators" for _, note in loaded.notes)


def test_gloo_spans_are_united_and_never_added_up(real, expected) -> None:
    key = "hta/cpu_only_gloo_r34of300/rank-34.pt.trace.json.gz"
    want = expected[key]["cpu"]
    row = trace.measure(real(key)).pooled
    assert row.comm / 1e3 == pytest.approx(want["comm_us"], abs=0.05)
    assert round(100 * row.share, 2) == want["comm_share_of_steps_pct"] and row.hidden == 0
    assert real(key).timeline.ranks == [34]


def test_megatron_waits_for_ranks_0_and_6(folder) -> None:
    loaded = trace.load(folder / "astra_sim" / "megatron_tp8_a100")
    found = trace.measure(loaded)
    assert loaded.timeline.ranks == list(range(8)) and found.late == (0, 6)
    wait, transfer = (sum(part) for part in zip(*trace.waits(found).values()))
    assert 0.8 < wait / (wait + transfer) < 0.9
    late = next(f for f in trace.diagnose(loaded, found) if f.code == "late-rank")
    assert late.ranks == (0, 6)


def test_warm_up_kernels_belong_to_no_step(real) -> None:
    loaded = real(MI300)
    counted = [s for s in loaded.timeline if s.kind == "comm" and s.step in loaded.timeline.steps]
    assert len(counted) == 12 and sum(s.kind == "comm" for s in loaded.timeline) == 17


def test_rccl_says_what_it_does(real) -> None:
    """All RCCL kernels have one name; the type comes from what launched them."""
    names = [s.name for s in real(MI300).timeline if s.kind == "comm"]
    assert sum(n.startswith("all-reduce in group 0") for n in names) == 6
    assert sum(n.startswith("broadcast in group 0") for n in names) == 6
    assert sum(n.startswith("unknown collective") for n in names) == 5


def test_two_files_of_one_rank_are_both_kept(folder) -> None:
    loaded = trace.load(folder / "hta" / "trace_compare_dup_rank")
    assert len(loaded.ranks) == 2 and loaded.timeline.ranks == [1, 2]
    assert [note.code for _, note in loaded.notes].count("duplicate-rank") == 1


@pytest.mark.parametrize(("name", "words"), [
    ("benchmark_simple_add_et.json.gz", "PyTorch execution trace"),
    ("jsonData/chakra.0.json.gz", "Chakra"), ("jsonData/small_chakra.0.json", "Chakra")])
def test_execution_traces_are_refused(folder, name: str, words: str) -> None:
    with pytest.raises(trace.TraceError, match=words):
        trace.read(folder / "chakra" / "not_chrome_trace" / name)


def test_every_device_name_is_classified_as_the_independent_list_does(real, expected) -> None:
    for key in DEVICE:
        comm = set(expected[key]["comm_names"])
        for k in real(key).ranks[0].facts.launched:
            if k.kind == "compute":
                assert not is_communication(k.name) and k.name[:70] not in comm, k.name


def test_a_file_of_ten_megabytes_is_read_in_under_a_second(folder) -> None:
    """CPU seconds of the best of three: the machine may be busy with something else."""
    seconds = []
    for _ in range(3):
        begun = time.process_time()
        trace.diagnose(trace.load(folder / DDP))
        seconds.append(time.process_time() - begun)
    assert min(seconds) < 1, seconds
