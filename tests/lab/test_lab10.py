"""Exercises 10.1 to 10.4: right answers of several kinds pass, odd ones are told what is odd; the runs on ranks."""

from __future__ import annotations

import json
import shutil
import subprocess
from fractions import Fraction
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.lab import CheckFailed, LabError, evaluate
from course_lib.lab.pictures.pipeline_picture import Drawn, bars, pipelines
from course_lib.lab.pictures.pipeline_widget import ESM, UNIT, explore_pipelines, positions
from course_lib.lab.workbench.pipeline import pipeline_runs
from course_lib.lab.workbench.pipeline_words import is_words, placed, schedule_of, words_of
from course_lib.launch import Fabric
from course_lib.link_cost import LinkCost
from course_lib.schedule import (
    ScheduleError,
    add_reductions,
    check,
    gpipe,
    interleaved,
    one_f_one_b,
    with_messages,
    zb_v,
    zero_bubble,
)
from course_lib.simulate.pipeline import Costs, predict

seeds = st.integers(0, 10**6)


# right answers of other kinds


def by_state(p, m, rank):
    """A generator that does what is possible next."""
    forward = backward = 0
    while backward < m:
        if forward < m and forward - backward < p - rank:
            yield f"F{forward}"
            forward += 1
        else:
            yield f"B{backward}"
            backward += 1
    yield "reduce0"


def by_the_library(p, m, rank):
    return tuple(words_of(add_reductions(one_f_one_b(p, m)))[rank])


def each_as_far_as_it_can(lists, receive_of, needs):
    """A rank goes on until it has to wait."""
    rest, out, posted = [list(words) for words in lists], [[] for _ in lists], set()
    while any(rest):
        for r, words in enumerate(rest):
            while words and (needs(words[0]) is None or needs(words[0]) in posted):
                word = words.pop(0)
                if word.startswith("send"):
                    peer, receive = receive_of(word)
                    posted.add(receive)
                    out[peer].append(receive)
                out[r].append(word)
    return out


def a_computation_and_its_sends_at_a_time(lists, receive_of, needs):
    """From the last rank to the first; a dictionary instead of lists while it works."""
    at, out, posted = dict.fromkeys(range(len(lists)), 0), {r: [] for r in range(len(lists))}, []
    while any(at[r] < len(lists[r]) for r in at):
        for r in reversed(at):
            first = True
            while at[r] < len(lists[r]) and (first or lists[r][at[r]].startswith("send")):
                word = lists[r][at[r]]
                if needs(word) is not None and needs(word) not in posted:
                    break
                if word.startswith("send"):
                    peer, receive = receive_of(word)
                    out[peer] += [receive]
                    posted.append(receive)
                out[r] += [word]
                at[r] += 1
                first = False
    return tuple(out[r] for r in range(len(lists)))


def by_positions(words, delay):
    """W by the place of the backward it belongs behind."""
    backwards = [w for w in words if w.startswith("B")]
    behind = {}
    for k, w in enumerate(backwards):
        behind.setdefault(backwards[k + delay] if k + delay < len(backwards) else None, []).append("W" + w[1:])
    for b in [b for b in behind if f"send_{b}" in words]:
        behind["send_" + b] = behind.pop(b)
    body = [w for w in words if not w.startswith("reduce")]
    out = list(chain.from_iterable([w.replace("B", "I") if w.startswith("B") else w, *behind.get(w, [])] for w in body))
    return (*out, *behind.get(None, []), *(w for w in words if w.startswith("reduce")))


def by_trying(p, percent, v):
    m = p if v > 1 else 1
    while Fraction(p - 1, v * m + p - 1) > Fraction(percent, 100):
        m += p if v > 1 else 1
    return float(m)


@settings(max_examples=6, deadline=None)
@given(seeds)
@pytest.mark.parametrize(("number", "answer"), [
    ("10.1", by_state), ("10.1", by_the_library), ("10.2", each_as_far_as_it_can),
    ("10.2", a_computation_and_its_sends_at_a_time), ("10.3", by_positions), ("10.4", by_trying)])
def test_right_answers_pass_whatever_is_drawn(number: str, answer, seed: int) -> None:
    result = evaluate(number, answer, seed=seed)
    assert result.ok, [row for row in result.rows if not row.ok]


@pytest.mark.parametrize(("number", "answer", "seen"), [
    ("10.1", lambda p, m, rank: "F0 B0", "gave F0 B0"),
    ("10.1", lambda p, m, rank: [0, 1], "gave [0, 1]"),
    ("10.1", lambda p, m, rank: [], "lacks F0 and B0"),
    ("10.1", lambda p, m, rank: ["F0", "hop"], "'hop' is not an action"),
    ("10.1", lambda p, m, rank: [f"F{m}", f"B{m}"], "but the schedule has micro-batches 0 to"),
    ("10.1", lambda p, m: [], "raised TypeError"),
    ("10.2", lambda lists, receive_of, needs: lists[0], "gave ["),
    ("10.2", lambda lists, receive_of, needs: [[""] for _ in lists], "'' is not an action"),
    ("10.2", lambda lists, receive_of, needs: receive_of("F0@0"), "receive_of('F0@0'): that is no send"),
    ("10.2", lambda lists, receive_of, needs: needs("recv"), "needs('recv'): that is no word"),
    ("10.3", lambda words, delay: " ".join(words), "gave recv_F0 F0"),
    ("10.3", lambda words, delay: [], "gave"),
    ("10.3", lambda words, delay: words[99], "raised IndexError"),
    ("10.4", lambda p, percent, v: "8", "gave 8"),
    ("10.4", lambda p, percent, v: True, "gave True"),
    ("10.4", lambda p, percent, v: float("nan"), "gave nan"),
])
def test_odd_answers(number: str, answer, seen: str) -> None:
    result = evaluate(number, answer, seed=0)
    assert not result.ok and seen in " ".join(row.seen for row in result.rows if not row.ok)


@pytest.mark.parametrize("number", ["10.1", "10.2", "10.3", "10.4"])
def test_stubs_say_so(number: str) -> None:
    def stub(*arguments):
        raise NotImplementedError("exercise")

    with pytest.raises(CheckFailed, match=f"exercise {number} is not written yet"):
        evaluate(number, stub)


def test_a_circle_is_shown_with_who_waits_for_whom() -> None:
    result = evaluate("10.2", lambda lists, receive_of, needs: [
        [w for word in words for w in ((needs(word), word) if needs(word) else (word,))] for words in lists], seed=0)
    assert result.mistake == "circle"
    assert "waits for rank 1 to post recv_F1" in " ".join(row.seen for row in result.rows)


# words


@pytest.mark.parametrize("schedule", [gpipe(2, 3), interleaved(2, 4, 2), zb_v(2, 3), with_messages(zero_bubble(3, 4)),
                                      add_reductions(one_f_one_b(3, 4))])
def test_words_say_the_schedule(schedule) -> None:
    again = schedule_of(words_of(schedule), schedule.rank_of, schedule.micro_batches, bool(schedule.buckets))
    assert again == schedule


def test_words_that_are_none_are_refused() -> None:
    assert is_words(("F0",)) and not is_words("F0") and not is_words(["F0", 1])
    with pytest.raises(ScheduleError, match="rank 1 has"):
        schedule_of([["F0", "B0"], ["F0", 0]])


def test_receives_are_placed_by_whoever_places_them() -> None:
    schedule = placed(add_reductions(interleaved(2, 4, 2)), each_as_far_as_it_can)
    assert check(schedule).sends == (12, 12) and schedule.buckets == (1, 1, 1, 1)


# on ranks

PACED = Fabric(gbit=1.0, latency_us=100, kind="paced")


def test_a_pipeline_on_two_ranks_beside_torchs() -> None:
    m = 4
    made = {"1F1B": placed(one_f_one_b(2, m), each_as_far_as_it_can), "ZB-V": zb_v(2, m)}
    found = pipeline_runs(made, {"torch": ("1F1B", m, 1)}, stage_ms=(3.0, 3.0, 3.0), message_kb=4, fabric=PACED,
                          repeats=2)
    assert list(found.runs) == ["1F1B", "ZB-V", "torch"]
    assert all(one.from_reference < 1e-6 for one in found.runs.values())
    for name, schedule in made.items():
        one, v = found.runs[name], schedule.stages // 2
        assert one.kept == tuple(peak / v for peak in check(with_messages(schedule)).peak_activations)
        free = predict(schedule, Costs(*[0.003 / v] * 3))
        assert one.median_s >= free.step_s and one.bubble >= free.bubble - 1e-9
        assert found.predict(schedule).step_s > free.step_s
    assert found.runs["torch"].kept == (2, 1)
    sends = [s for s in found.runs["1F1B"].timeline.select(rank=0, step=0) if s.name == "send"]
    assert len(sends) == m and {s.bytes for s in sends} == {found.message_bytes} == {4096}
    picture = pipelines({name: Drawn(found.predict(schedule).timeline, found.runs[name].timeline, found.runs[name].kept)
                         for name, schedule in made.items()})
    assert "measured" in picture.words and picture.png()[:4] == b"\x89PNG"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "v", "make"), [
    ("GPipe", 1, gpipe), ("interleaved", 2, lambda p, m: interleaved(p, m, 2)), ("zero bubble", 1, zero_bubble),
    ("ZB-V", 2, zb_v)])
def test_torchs_other_pipelines_keep_and_compute_the_same(kind, v, make) -> None:
    found = pipeline_runs({"ours": make(3, 6)}, {"torch": (kind, 6, v)}, stage_ms=(2.0, 2.0, 2.0), fabric=PACED,
                          repeats=2)
    assert all(one.from_reference < 1e-6 for one in found.runs.values())
    assert found.runs["ours"].kept == found.runs["torch"].kept


@pytest.mark.slow
def test_a_pipeline_of_one_rank_needs_no_wire() -> None:
    found = pipeline_runs({"alone": one_f_one_b(1, 3)}, stage_ms=(2.0, 2.0, 2.0), fabric=PACED, repeats=2)
    assert found.runs["alone"].kept == (1,) and found.link.cost(10**9) == 0


def test_what_cannot_run_is_refused_before_any_rank_starts() -> None:
    with pytest.raises(ScheduleError, match="lacks B0"):
        pipeline_runs({"half": schedule_of([["F0"]])}, fabric=PACED)


# the picture


def test_a_bar_for_each_action() -> None:
    timeline = predict(zb_v(2, 3), Costs(1e-3, 1e-3, 1e-3)).timeline
    drawn = bars(timeline)
    assert [len(drawn[rank]) for rank in (0, 1)] == [18, 18]
    assert {bar.stage for bar in drawn[0]} == {0, 3} and min(bar.start for bar in drawn[0]) == 0
    assert sum(bar.stop - bar.start for bar in drawn[1]) == 18_000_000


def test_what_is_drawn_is_said_in_words() -> None:
    timeline = predict(one_f_one_b(2, 2), Costs(1e-3, 1e-3, 1e-3)).timeline
    assert pipelines({"1F1B": Drawn(timeline, kept=(2, 1))}).words == "1F1B: 9 ms, bubble 33%; keeps at most 2"
    assert pipelines({"1F1B": Drawn(timeline, timeline)}, dark=True).png()[:4] == b"\x89PNG"


def test_nothing_to_draw_is_refused() -> None:
    for nothing in ({}, {"1F1B": Drawn()}):
        with pytest.raises(LabError, match="at least one pipeline"):
            pipelines(nothing)


# the sliders

MAKERS = {"1F1B": one_f_one_b, "ZB-V": zb_v}


def test_the_browser_draws_what_is_predicted(tmp_path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: JavaScript cannot be compared with Python")
    data = positions(MAKERS, [2, 3], [4], [0, 0.5])
    (tmp_path / "widget.mjs").write_text(ESM.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "data.json").write_text(json.dumps(data))
    (tmp_path / "run.mjs").write_text("""import * as w from "./widget.mjs"; import { readFileSync } from "node:fs";
        const d = JSON.parse(readFileSync("data.json")), out = {};
        for (const [key, run] of Object.entries(d.runs))
          out[key] = d.message.map((_, k) => run.words.map((_, rank) => w.bars(run, rank, k, d.unit)));
        const at = { schedule: "1F1B", p: 2, m: 4, message: 0 };
        console.log(JSON.stringify([out, w.sentence(d.runs["1F1B|2|4"], at, d)]));""")
    done = subprocess.run([node, "run.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    drawn, sentence = json.loads(done.stdout)
    for key, rows in drawn.items():
        name, p, m = key.split("|")
        made = MAKERS[name](int(p), int(m))
        v = made.stages // int(p)
        for message, ranks in zip((0, 0.5), rows):
            costs = Costs(*[UNIT * 1e-9 / v] * 3, link=LinkCost(UNIT * 1e-9 * message, 0.0))
            expected = bars(predict(made, costs).timeline)
            for rank, row in enumerate(ranks):
                assert [(b["op"], int(b["index"]), b["stage"], b["start"], b["stop"]) for b in row] == expected[rank]
    assert sentence == "1F1B, p = 2, m = 4: the step takes 15.0 F, bubble 20.0 %, a rank keeps at most 2 activations"


def test_the_widget_shows_its_picture_where_nothing_else_can_be_shown() -> None:
    pytest.importorskip("anywidget")
    widget = explore_pipelines(MAKERS, schedule="1F1B", p=(2, [2, 3]), m=(4, [2, 4]), message=(0, [0, 0.5]))
    assert set(widget.data["runs"]) == {f"{name}|{p}|{m}" for name in MAKERS for p in (2, 3) for m in (2, 4)}
    assert widget.picture().words == "1F1B, p = 2, m = 4: 150 ms, bubble 20%; keeps at most 2"
    widget.at = widget.at | {"schedule": "ZB-V"}
    assert widget.picture().words.startswith("ZB-V, p = 2, m = 4")
