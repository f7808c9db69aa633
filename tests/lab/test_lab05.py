"""Exercises 5.1 to 5.4: right answers of several kinds pass, odd ones are told so; given traces; the runs."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import overlap, timeline, trace
from course_lib.lab import CheckFailed, evaluate
from course_lib.lab.exercises.lab05.given import FOLDER, STEP, given_steps, given_traces
from course_lib.lab.workbench.busy import device_waiting, waiting
from course_lib.lab.workbench.profiled import events_of, profiled_run
from course_lib.launch import Fabric
from course_lib.launch.fabric import gpus
from course_lib.show.lanes import lanes
from course_lib.show.scene import scene
from course_lib.show.utilisation import Sampled, utilisation
from course_lib.timeline import Span, Timeline
from course_lib.trace.classify import is_communication

WIRE = Fabric(gbit=1.0, latency_us=2000, kind="paced")


def union_by_library(spans):
    return timeline.union(np.array(spans, np.int64).reshape(-1, 2)).tolist()


def union_by_edges(spans):
    """By counting how many spans are open."""
    edges = sorted([(start, -1) for start, stop in spans if stop > start] + [(stop, 1) for start, stop in spans
                                                                            if stop > start])
    out, depth = [], 0
    for at, kind in edges:
        if depth == 0:
            out.append([at, at])
        depth -= kind
        out[-1][1] = at
    return out


def exposed_by_edges(events, steps):
    """By sweeping over all edges of a rank, instead of joining."""
    found = {}
    for (rank, step), (begin, end) in steps.items():
        work = [(is_communication(name) or name.startswith("wire::"), a, b) for r, category, name, a, b in events
                if r == rank and category == "kernel"]
        comm = [(a, b) for sends, a, b in work if sends and begin <= a < end]
        compute = [(a, b) for sends, a, b in work if not sends]
        edges = sorted({t for span in comm + compute for t in span})
        parts = [0, 0]
        for a, b in pairwise(edges):
            if any(start <= a < stop for start, stop in comm):
                parts[any(start <= a < stop for start, stop in compute)] += b - a
        found[rank, step] = np.array(parts) if comm else None
    return found


def union_sorting_in_place(spans):
    """Sorts what it was given."""
    spans.sort()
    return union_by_library(spans)


def size_by_search(G_bytes, a_s, beta_s_per_byte, Tb_s):
    """The least arrival of two thousand sizes."""
    S = np.linspace(0.0005, 1, 2000) * G_bytes
    slow = Tb_s * S / G_bytes + a_s * G_bytes / S + beta_s_per_byte * G_bytes
    return S[np.argmin(np.maximum(slow, Tb_s + a_s + beta_s_per_byte * S))]


def diagnose_by_library(spans):
    """With the library's collectives and intervals."""
    rows = [Span(rank, "comm" if kind == "comm" else "compute", kind, "all_reduce" if kind == "comm" else kind, a, b,
                 step=0) for rank, kind, a, b in spans]
    begin, end = min(s.start for s in rows), max(s.stop for s in rows)
    ranks = {s.rank for s in rows}
    found = overlap.report(Timeline.of(rows + [Span(r, "step", "step", "step", begin, end, step=0) for r in ranks]))
    W, M, C = found.wait, sum(s.stop - s.start for s in rows if s.kind == "comm"), found.pooled.compute
    exposed = found.pooled.exposed / (len(ranks) * (end - begin))
    ends = {r: max(s.stop for s in rows if s.rank == r and s.lane == "backward") for r in ranks}
    if W / M > 0.5:
        return ["late rank", W / M]
    if not any(s.start < ends[s.rank] for s in rows if s.kind == "comm"):
        return ["held back", exposed]
    return ("slow wire", (M - W) / C) if M - W > C else ("nothing to gain", np.float64(exposed))


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6))
@pytest.mark.parametrize(("number", "answer"), [
    ("5.1", union_by_library), ("5.1", union_by_edges), ("5.1", union_sorting_in_place), ("5.2", exposed_by_edges),
    ("5.3", size_by_search), ("5.4", diagnose_by_library)])
def test_right_answers_pass_whatever_is_drawn(number: str, answer, seed: int) -> None:
    result = evaluate(number, answer, seed=seed)
    assert result.ok, [row for row in result.rows if not row.ok]


@pytest.mark.parametrize(("number", "answer", "seen"), [
    ("5.1", lambda spans: 3, "gave 3"),
    ("5.1", lambda spans: spans[9], "raised IndexError"),
    ("5.2", lambda events, steps: [], "gave []"),
    ("5.2", lambda events, steps: {}, "has []"),
    ("5.2", lambda events, steps: dict.fromkeys(steps, 3), "has 3 for (0, 0)"),
    ("5.3", lambda G, a, beta, Tb: "3 MB", "gave '3 MB'"),
    ("5.3", lambda G, a, beta, Tb: -G, "the best is"),
    ("5.3", lambda G, a, beta, Tb: float("nan"), "the best is"),
    ("5.4", lambda spans: "late rank", "gave 'late rank'"),
    ("5.4", lambda spans: ("gremlins", 1), "gave ('gremlins', 1)"),
    ("5.4", lambda spans: ("slow wire", float("nan")), "nan"),
])
def test_odd_answers(number: str, answer, seen: str) -> None:
    result = evaluate(number, answer, seed=0)
    assert not result.ok and seen in " ".join(row.seen for row in result.rows if not row.ok)


@pytest.mark.parametrize("number", ["5.1", "5.2", "5.3", "5.4"])
def test_stubs_say_so(number: str) -> None:
    def stub(*arguments):
        raise NotImplementedError("exercise")

    with pytest.raises(CheckFailed, match=f"exercise {number} is not written yet"):
        evaluate(number, stub)


def test_what_a_check_hands_over_may_be_changed_by_the_answer() -> None:
    def greedy(events, steps):
        found = exposed_by_edges(events, steps)
        events.clear()
        steps.clear()
        return found

    assert evaluate("5.2", greedy, seed=3).ok


def test_a_failed_row_for_a_given_trace_does_not_tell_the_answer() -> None:
    result = evaluate("5.4", lambda spans: ("nothing to gain", 0.5), seed=0)
    assert [row.expected for row in result.rows if row.name.startswith("trace")] == ["another"] * 3


def test_the_given_traces_have_the_causes_that_the_library_finds() -> None:
    causes = {name: {finding.code for finding in trace.diagnose(trace.load(FOLDER / name))} for name in given_traces()}
    assert "late-rank" in causes["A"]
    assert "after-backward" not in causes["A"] and "late-rank" not in causes["C"] | causes["B"]
    assert {name: diagnose_by_library(spans)[0] for name, spans in given_steps().items()} == {
        "A": "late rank", "B": "held back", "C": "slow wire"}


def test_the_given_traces_are_small_and_name_nothing_of_where_they_were_made() -> None:
    files = sorted(FOLDER.glob("*/*.json"))
    assert len(files) == 8
    for path in files:
        assert path.stat().st_size < 60_000
        assert {key for event in json.loads(path.read_text())["traceEvents"] for key in event} == {
            "ph", "cat", "name", "pid", "tid", "ts", "dur"}
    assert all(line.provenance == "measured (real wires, emulated device)" for line in given_traces().values())


def test_figures_of_a_read_trace_show_its_work_and_its_waits_by_step() -> None:
    drawn = scene(given_traces()["A"], STEP)
    assert all(row.bars for row in drawn.rows)
    assert {step for _, step in trace.waits(overlap.report(given_traces()["A"]))} == {0, 1, 2}


def test_a_busy_counter_does_not_tell_the_given_traces_apart() -> None:
    for line in given_traces().values():
        assert max(row.busy for row in overlap.report(line).rows if row.step == STEP) > 0.9


def tiny():
    from course_lib.train import emulated

    return emulated.equal(layers=4, mb=0.25, forward_ms=2, backward_ms=4)


def test_a_profiled_run_is_read_back_and_the_late_rank_is_found(tmp_path) -> None:
    found = profiled_run(tiny, "bucketed", {"bucket_mb": 0.5, "first_bucket_mb": None}, fabric=WIRE, steps=2,
                         late_ms={1: 60}, folder=tmp_path)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["rank-0.json", "rank-1.json"]
    assert found.timeline.ranks == [0, 1] and found.timeline.steps == [0, 1]
    assert found.plain_ms > 60 + 24
    report = trace.measure(found.trace)
    assert report.late == (1,)
    mine = exposed_by_edges(*events_of(found.timeline))
    for row in report.rows:
        assert tuple(mine[row.rank, row.step]) == (row.exposed, row.hidden)


def test_a_rank_that_spins_reads_busy_and_one_that_sleeps_does_not() -> None:
    spins, sleeps = (waiting(how, work_s=0.05, late_s=0.2, fabric=WIRE) for how in ("spins", "sleeps"))
    assert spins.useful_share == pytest.approx(sleeps.useful_share, abs=0.1)
    assert spins.busy_share > 0.8 and sleeps.busy_share < 0.5
    with pytest.raises(ValueError, match="choose spins or sleeps"):
        waiting("hopes")


@pytest.mark.gpu
@pytest.mark.skipif(gpus() < 1, reason="needs a CUDA device")
def test_a_kernel_that_only_spins_reads_busy() -> None:
    assert device_waiting(3.0) > 0.9


def test_shares_of_a_sampled_counter() -> None:
    one = Sampled([0.0, 1.0, 3.0], [1.0, 0.25], [(0.0, 0.5), (2.5, 9.0)])
    assert one.busy_share == pytest.approx(0.5)
    assert one.useful_share == pytest.approx(1 / 3)


@pytest.mark.parametrize("dark", [False, True])
def test_the_pictures(dark: bool) -> None:
    one = Sampled([0.0, 1.0, 3.0], [1.0, 0.25], [(0.0, 0.5)])
    counter = utilisation({"waits": one}, provenance="simulated", dark=dark)
    assert "waits: the counter says 50%, useful 17%" in counter.words and counter.png()[:4] == b"\x89PNG"
    step = lanes(given_traces()["B"], step=STEP, title="B", dark=dark)
    assert "without a verdict" in step.words and step.png()[:4] == b"\x89PNG"
    shown = [text.get_text() for text in step.texts]
    assert "measured (real wires, emulated device)" in shown and not any("exposed" in text for text in shown)


def test_nothing_to_draw_is_said() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        lanes(Timeline.of([], "simulated"))
    with pytest.raises(ValueError, match="nothing to draw"):
        utilisation({})
