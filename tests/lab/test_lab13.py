"""Exercises 13.1 to 13.3: right answers of several kinds pass, odd ones are told what is odd; runs, scores, recall."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import lab
from course_lib.lab import CheckFailed, evaluate
from course_lib.lab.recall import recall
from course_lib.lab.workbench.joint import JointRun, JointRuns, joint_runs
from course_lib.lab.workbench.pipeline_words import with_words, words_of
from course_lib.lab.workbench.way import BUCKETS, EVERY, JOINT, ONCE, Way, WayRun, one_update, traffic_s, way_runs
from course_lib.launch import Fabric
from course_lib.schedule import Op, ScheduleError, check, one_f_one_b, zero_bubble
from course_lib.schedule.degrees import Degrees
from course_lib.schedule.joint import naive, reductions_at_last_use
from course_lib.simulate.greedy import greedy
from course_lib.simulate.pipeline import Costs, period, predict, updates
from course_lib.timeline import Span, Timeline

seeds = st.integers(0, 10**6)
COSTS = Costs(F=0.01, I=0.01, W=0.01, reduce=0.005, gather=0.01, step=0.0005)


# right answers of other kinds


def from_behind(words):
    """Backwards through the list, a generator, buckets the other way around."""
    moving = [w for w in words if w.startswith("reduce")]
    seen, out = set(), []
    for word in reversed(words):
        stage = word.split("@")[1]
        if word[0] in "BW" and stage not in seen:
            seen.add(stage)
            out += [r for r in moving if r.endswith(f"@{stage}")]
        if word not in moving:
            out.append(word)
    yield from reversed(out)


def by_counting(words):
    """Behind as many W or B as the stage has."""
    left = {}
    for word in words:
        if word[0] in "WB":
            left[word.split("@")[1]] = left.get(word.split("@")[1], 0) + 1
    out = []
    for word in words:
        if word.startswith("reduce"):
            continue
        out.append(word)
        if word[0] in "WB":
            stage = word.split("@")[1]
            left[stage] -= 1
            if not left[stage]:
                out.extend(w for w in words if w.startswith("reduce") and w.split("@")[1] == stage)
    return tuple(out)


def needed_first_gathered_first(lists, seconds):
    """No word crosses the end of a list: the step and gather that the next pass needs first come before the others,
    whose gathers travel under its first forwards."""
    out = []
    for words in lists:
        order = list(dict.fromkeys(w.split("@")[1] for w in words if w[0] == "F"))
        end = [w for w in words if w.startswith(("step", "gather"))]
        turned = sorted(end, key=lambda w: (order.index(w.split("@")[1]), w.startswith("gather")))
        out.append(tuple([w for w in words if w not in end] + turned))
    return tuple(out)


def into_the_next_pass(lists, seconds):
    def moved(words, ahead):
        words = list(words)
        order = list(dict.fromkeys(w.split("@")[1] for w in words if w[0] == "F"))
        for stage in order[1:]:
            taken = [w for w in words if w.startswith(("step", "gather")) and w.endswith(f"@{stage}")]
            words = [w for w in words if w not in taken]
            at = max(0, next(k for k, w in enumerate(words) if w[0] == "F" and w.endswith(f"@{stage}")) - ahead)
            words[at:at] = taken
        return words

    return min(([moved(words, ahead) for words in lists] for ahead in range(4)), key=seconds)


def by_product(gpus, B, b, micro_s, data_s, memory, limit):
    """All at once, as a list."""
    found = [((B // (b * D) + p - 1) * micro_s(t, p) + data_s(t, p, D), [t, p, D, B // (b * D)])
             for t, p in product((8, 4, 2, 1), range(gpus, 0, -1)) if t * p <= gpus and gpus % (t * p) == 0
             for D in [gpus // (t * p)] if B % (b * D) == 0 and memory(t, p, D) <= limit]
    return min(found)[1] if found else None


@settings(max_examples=3, deadline=None)
@given(seeds)
@pytest.mark.parametrize(("number", "answer"), [
    ("13.1", from_behind), ("13.1", by_counting), ("13.2", into_the_next_pass), ("13.3", by_product)])
def test_right_answers_pass_whatever_is_drawn(number: str, answer, seed: int) -> None:
    result = evaluate(number, answer, seed=seed)
    assert result.ok, [row for row in result.rows if not row.ok]


def test_a_way_that_nobody_thought_of_is_judged_by_its_seconds() -> None:
    result = evaluate("13.2", needed_first_gathered_first, seed=0)
    assert all(row.ok for row in result.rows[:4])
    assert result.ok or result.mistake == "too_little"


@pytest.mark.parametrize(("number", "answer", "seen"), [
    ("13.1", lambda words: " ".join(words), "gave F0@0"),
    ("13.1", lambda words: 3, "gave 3"),
    ("13.1", lambda words: [*words, "hop"], "hop"),
    ("13.1", lambda words: words[0], "gave F0@0"),
    ("13.1", lambda words: 1 / 0, "ZeroDivisionError"),
    ("13.2", lambda lists, seconds: lists[0], "gave ['F0@0'"),
    ("13.2", lambda lists, seconds: seconds("F0"), "give a list of words"),
    ("13.2", lambda lists, seconds: [[*words, "hop@0"] for words in lists], "extra hop@0"),
    ("13.2", lambda lists, seconds: lists[::-1], "rank 0"),
    ("13.3", lambda *arguments: "8", "gave 8"),
    ("13.3", lambda *arguments: (1, 2, 3), "gave (1, 2, 3)"),
    ("13.1", lambda words: words if "W0@0" in words or "W0@1" in words else 1 / 0, "step@2 gather@2) raised Zero"),
    ("13.3", lambda gpus, B, b, micro_s, *rest: micro_s(3, 1), "micro_s(3, 1): t is 1, 2, 4 or 8"),
    ("13.3", lambda gpus, B, b, micro_s, *rest: micro_s(2, 0.5), "micro_s(2, 0.5): p is a whole number of 1 to"),
    ("13.3", lambda gpus, B, b, micro_s, data_s, *rest: data_s(2, 1, 0), "data_s(2, 1, 0): D is 1 at least"),
    ("13.3", lambda *arguments: (1, 1, 1, 1), "none of those that can be"),
])
def test_odd_answers(number: str, answer, seen: str) -> None:
    result = evaluate(number, answer, seed=0)
    assert not result.ok and seen in " ".join(row.seen for row in result.rows if not row.ok)


@pytest.mark.parametrize("number", ["13.1", "13.2", "13.3"])
def test_stubs_say_so(number: str) -> None:
    def stub(*arguments):
        raise NotImplementedError("exercise")

    with pytest.raises(CheckFailed, match=f"exercise {number} is not written yet"):
        evaluate(number, stub)


# words and schedules


@pytest.mark.parametrize("schedule", [naive(zero_bubble(2, 3, 2), 2), naive(one_f_one_b(3, 4), 1)])
def test_words_and_back(schedule) -> None:
    assert with_words(schedule, words_of(schedule)) == schedule
    moved = with_words(schedule, words_of(reductions_at_last_use(schedule)))
    check(moved)
    with pytest.raises(ScheduleError, match="not an action"):
        with_words(schedule, [["hop"], *words_of(schedule)[1:]])


# runs


def simulated(name: str, schedule) -> JointRun:
    timeline = predict(schedule, COSTS, 4).timeline
    return JointRun(name, schedule, tuple(updates(timeline)), timeline, 0.0)


def test_what_a_run_hides_is_counted_on_the_wire_of_its_rank() -> None:
    bare = zero_bubble(2, 4, 3)
    kinds = {"given": naive(bare, 2), "early": reductions_at_last_use(naive(bare, 2)), "greedy": greedy(bare, COSTS, 2)}
    runs = {name: simulated(name, schedule) for name, schedule in kinds.items()}
    found = JointRuns(runs, COSTS, Degrees(2))
    assert runs["given"].hidden < 0.1 < runs["early"].hidden < runs["greedy"].hidden <= 1
    assert found.traffic_s("given", (Op.REDUCE,)) == pytest.approx(3 * 2 * 0.005)
    assert found.traffic_s("given") == pytest.approx(3 * 0.02) == traffic_s(kinds["given"], COSTS)
    saved = runs["given"].median_s - runs["early"].median_s
    assert saved == pytest.approx(2 * 2 * 0.005), "all but the last stage of a rank"
    assert found.predicted_s("early") == period(kinds["early"], COSTS) >= found.bound("early").seconds
    assert [line.ranks for line in found.pair("early")] == [[0, 1], [0, 1]]


def test_hidden_by_hand() -> None:
    spans = [Span(0, "compute", "device", "F0", 0, 10, -1, -1, k) for k in range(3)]
    spans += [Span(0, "comm", "wire", "reduce_scatter", 6, 14, -1, -1, 1),
              Span(0, "comm", "wire", "all_reduce", 20, 90, -1, -1, 1),  # of tensor parallelism
              Span(0, "comm", "wire", "all_gather", 20, 30, -1, -1, 2)]  # of the last pass
    spans += [Span(0, "step", "step", f"step {k}", 0, 100, -1, -1, k) for k in range(3)]
    run = JointRun("one", naive(zero_bubble(1, 1, 1)), (1.0, 1.0), Timeline.of(spans, "measured"), 0.0)
    assert run.hidden == 0.5


def way(**seconds: float) -> Way:
    empty = Timeline.of([], "measured")
    return Way({name: WayRun(name, (took,) * 3, empty) for name, took in seconds.items()}, Tc=1.0, Tm=1.2, joint_Tm=0.4)


def test_each_way_is_scored_by_the_traffic_of_its_own_layout() -> None:
    found = way(serial=3.0, no_sync=2.2, buckets=1.8, joint=1.25)
    assert [found.fair_score(name).value for name in (EVERY, ONCE, BUCKETS, JOINT)] == pytest.approx(
        [0, 0.8 / 1.8, 1.2 / 1.8, 1.75 / 2])


def test_an_update_is_drawn_from_the_begin_of_a_pass_to_that_of_the_next() -> None:
    made = greedy(zero_bubble(2, 4, 3), COSTS, 2)
    passes = predict(made, COSTS, 4).timeline
    one = one_update(passes)
    assert one.ranks == [0] and one.steps == [1]
    (step,) = one.select(kind="step").spans
    assert (step.stop - step.start) / 1e9 == pytest.approx(period(made, COSTS), rel=1e-6)
    compute = sum(s.stop - s.start for s in one.select(kind="compute")) / 1e9
    assert compute == pytest.approx(12 * 0.03 + 3 * 0.0005, rel=1e-6)
    assert all(step.start <= s.start <= s.stop <= step.stop for s in one)
    with pytest.raises(ValueError, match="2 passes"):
        one_update(predict(made, COSTS, 2).timeline)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="give one for 2 ranks and an even number"):
        way_runs(naive(zero_bubble(3, 4, 1)))
    bare = zero_bubble(2, 2, 2)
    late = with_words(naive(bare), [[w for w in words if w != "W0@0"] for words in words_of(naive(bare))])
    with pytest.raises(ScheduleError, match="lacks W0@0"):
        joint_runs({"lacks": late}, degrees=Degrees(2, 1, 2))


WIRE = Fabric(gbit=1.0, latency_us=100, nodes=2, inter_gbit=0.2, inter_latency_us=300, kind="paced")


def test_schedules_on_ranks_train_like_one_process() -> None:
    bare = zero_bubble(2, 2, 2)
    given = naive(bare, 2)
    kinds = {"given": given, "greedy": greedy(bare, COSTS, 2)}
    found = joint_runs(kinds, degrees=Degrees(2, 1, 2), action_ms=4, stage_kb=32, fabric=WIRE, passes=3, rounds=1)
    assert list(found.runs) == list(kinds)
    for name, one in found.runs.items():
        assert one.from_reference < 1e-5
        assert len(one.updates_s) == 2 and one.timeline.ranks == [0, 1, 2, 3]
        assert "paced" in one.timeline.provenance
        assert one.median_s > 0.9 * found.bound(name).seconds
    assert found.costs.reduce > 0 and found.costs.gather > 0
    assert found["given"].hidden < found["greedy"].hidden


@pytest.mark.slow
def test_the_whole_way_on_ranks() -> None:
    bare = zero_bubble(2, 4, 2)
    found = way_runs(greedy(bare, COSTS, 2), action_ms=6, stage_kb=64, fabric=WIRE, passes=3, rounds=2)
    assert list(found.runs) == [EVERY, ONCE, BUCKETS, JOINT]
    assert found[EVERY].median_s > found[ONCE].median_s
    assert found.Tc == pytest.approx(2 * 4 * 18e-3, rel=0.2) and found.Tm > 0 and found.joint_Tm > 0
    sent = {name: sum(s.bytes for s in one.timeline.select(rank=0, kind="comm", step=1) if s.bytes > 0)
            for name, one in found.runs.items()}
    assert sent[EVERY] == 2 * sent[ONCE] == 2 * sent[BUCKETS]


# recall


def test_recall_shows_what_was_predicted_and_found(capsys: pytest.CaptureFixture) -> None:
    recall()
    assert "saved no prediction" in capsys.readouterr().out
    lab.predict("10.bubble", "How large?", unit="%", answer=12)
    lab.predict("4.order", "Which?", choices=["a", "b"], answer="a")
    lab.predict("2.never", "Asked and left", unit="s")
    lab.compare("10.bubble", 27)
    capsys.readouterr()
    recall()
    out = capsys.readouterr().out
    assert out.index("Which?") < out.index("How large?") and "Asked and left" not in out
    assert "you predicted 12 %; it was 27 %" in out and "you predicted a; it was not seen yet" in out
