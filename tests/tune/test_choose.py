"""Which layouts are measured, what is said of them, and that stock DDP really runs them."""

from __future__ import annotations

import pytest

from course_lib.launch import Fabric
from course_lib.link_cost import LinkCost
from course_lib.simulate.buckets import MB, GradientProfile
from course_lib.timeline import Span, Timeline
from course_lib.tune import Choice, Measured, calibrate, choose, sweep
from course_lib.tune.choose import predictions, shortlist

WIRE = Fabric(gbit=1.0, latency_us=4000, kind="paced")
LINK = LinkCost(0.004, 8e-9)
PROFILE = GradientProfile([f"p{i}" for i in range(16)], [MB] * 16, [0.01 * (i + 1) for i in range(16)], 0.08, 0.16)
CAPS = (1, 2, 4, 8, 16)
STEP = Timeline.of([Span(0, "step", "step", "step 0", 0, 10**8, -1, -1, 0)], "simulated")


def choice(compute=100.0, comm=80.0, serial=180.0, jitter=0.1, **layouts_ms) -> Choice:
    """A choice with given medians in ms; every variant is measured five times, `jitter` ms apart, each in its own
    order. Names of layouts are written `ddp_default`, `plan`, `c4` for a cap of 4 MB."""
    medians = {"compute": compute, "comm": comm, "serial": serial}
    medians |= {name.replace("_", " ") if name[0] != "c" else f"{name[1:]} MB": ms for name, ms in layouts_ms.items()}
    measured = {}
    for k, (name, ms) in enumerate(medians.items()):
        offsets = [(i * (k + 1) % 5 - 2) * jitter for i in range(5)] if (k + 1) % 5 else [0.0] * 5
        measured[name] = Measured(name, tuple((ms + o) * 1e-3 for o in offsets), STEP)
    return Choice(PROFILE, LINK, predictions(PROFILE, LINK, CAPS), measured)


def test_the_shortlist_is_the_default_the_plan_and_the_caps_predicted_best():
    predicted = predictions(PROFILE, LINK, CAPS)
    caps = sorted((f"{c} MB" for c in CAPS), key=lambda n: predicted[n].step_s)
    assert shortlist(predicted, 4) == ["ddp default", "plan", *caps[:2]]
    assert shortlist(predicted, 4, with_plan=False) == ["ddp default", *caps[:3]]
    assert shortlist(predicted, 2) == ["ddp default", "plan"]


def test_a_layout_is_measured_once_under_its_simplest_name():
    one = GradientProfile(["a", "b"], [4, 4], [0.2, 0.2], 0.1, 0.2)
    assert shortlist(predictions(one, LINK, CAPS), 4) == ["ddp default"]
    slow = LinkCost(0.0, 0.06 / MB)  # the wire is always busy and has no latency: the plan is a bucket a gradient
    three = GradientProfile(["a", "b", "c"], [2 * MB] * 3, [0.1, 0.2, 0.3], 0.1, 0.3)
    assert shortlist(predictions(three, slow, CAPS), 4) == ["ddp default", "1 MB", "4 MB", "8 MB"]


def test_a_clear_winner_is_recommended_with_its_arguments():
    found = choice(ddp_default=150, plan=120, c4=130)
    assert found.best == "plan" and found.settled and "20.0%" in found.verdict
    assert sum(found.ddp_arguments["bucket_cap_mb_list"]) == pytest.approx(16)
    found = choice(ddp_default=150, plan=131, c4=120)
    assert found.best == "4 MB" and found.ddp_arguments == {"bucket_cap_mb": 4.0}


@pytest.mark.parametrize("layouts, jitter, best", [
    ({"ddp_default": 121.0, "plan": 120.0}, 0.1, "ddp default"),  # under one percent
    ({"ddp_default": 150.0, "plan": 120.0, "c4": 120.5}, 0.1, "4 MB"),
    ({"ddp_default": 125.0, "plan": 120.0}, 20.0, "ddp default"),  # under the spread
    ({"ddp_default": 150.0, "c1": 120.0, "c4": 120.5}, 0.1, "4 MB"),  # fewer buckets are simpler
])
def test_a_tie_is_said_and_goes_to_the_simpler(layouts, jitter, best):
    found = choice(jitter=jitter, serial=400.0, **layouts)
    assert found.best == best and found.verdict.startswith("A tie")


def test_where_the_default_is_best_it_stays():
    found = choice(ddp_default=110, plan=120)
    assert found.best == "ddp default" and found.ddp_arguments == {} and "leave it" in found.verdict


def test_a_layout_that_only_ties_with_one_all_reduce_is_taken_where_the_default_is_worse():
    found = choice(serial=100.0, ddp_default=120.0, c4=100.2)
    assert found.best == "4 MB" and "120" in found.verdict and "saved" in found.verdict


def test_no_layout_is_faster_is_said_only_where_none_is():
    found = choice(serial=100.0, ddp_default=99.2, c4=98.4)
    assert found.best == "ddp default" and "tie" in found.verdict.lower()
    assert "Nothing to gain" in choice(serial=100.0, ddp_default=99.7, c4=99.5).verdict


def test_a_busy_machine_is_said():
    assert "machine was busy" in choice(ddp_default=150, plan=120, jitter=30.0).verdict
    assert "machine was busy" not in choice(ddp_default=150, plan=120).verdict


@pytest.mark.parametrize("times, says", [
    ({"comm": 10.0, "plan": 120.0}, "Nothing to gain here: r = 0.1"),
    ({"comm": 350.0, "plan": 120.0}, "4 instead of 1"),
    ({"serial": 150.0, "plan": 149.5}, "no layout is clearly faster than one all-reduce"),
])
def test_nothing_is_recommended_where_overlap_does_not_pay(times, says):
    found = choice(ddp_default=150, **times)
    assert says in found.verdict and found.best == "ddp default" and found.ddp_arguments == {}


def test_the_table_has_a_line_for_everything():
    lines = choice(ddp_default=150, plan=120, c4=130).table().splitlines()
    starts = ["compute", "comm", "serial", "1 MB", "2 MB", "4 MB", "8 MB", "16 MB", "plan", "ddp default", "T_floor"]
    assert [line.split("  ")[0] for line in lines[1:]] == starts
    assert [line for line in lines if "take this" in line] == [lines[starts.index("plan") + 1]]
    assert lines[starts.index("2 MB") + 1].endswith("–")


@pytest.fixture(scope="module")
def chosen() -> Choice:
    load = calibrate(1.0, WIRE, layers=8, gradient_mb=4.0, link=LINK)
    return choose(load.model, fabric=WIRE, caps_mb=(0.5, 1, 4), repeats=3)


def test_stock_ddp_runs_the_layouts_that_were_predicted(chosen):
    assert len(chosen.candidates) == 4
    for name in chosen.candidates:
        line = chosen.measured[name].timeline.select(rank=0, kind="comm", step=2)
        assert tuple(s.bytes for s in line) == chosen.predicted[name].plan.bytes, name


def test_a_choice_knows_its_wire_and_its_bounds(chosen):
    assert 0.5 < chosen.r < 2 and chosen.floor_s <= min(p.step_s for p in chosen.predicted.values()) + 1e-9
    assert all(len(m.seconds) == 3 and m.timeline.ranks == [0, 1] for m in chosen.measured.values())


@pytest.mark.parametrize("arguments, says", [
    ({"caps_mb": ()}, "no bucket size"),
    ({"caps_mb": (4, 0)}, "give sizes above 0"),
    ({"candidates": 1}, "at least 2"),
    ({"repeats": 1}, "at least 2 repeats"),
    ({"ranks": 0}, "ranks=0"),
    ({"fabric": "carrier pigeon"}, "unknown fabric"),
])
def test_choose_refuses_before_anything_starts(arguments, says):
    with pytest.raises(ValueError, match=says):
        choose(int, **arguments)


@pytest.mark.parametrize("cap", [0, -1, "big", float("nan")])
def test_sweep_refuses_caps_of_ddp_that_are_none(cap):
    with pytest.raises(ValueError, match="give sizes above 0"):
        sweep(int, caps_mb=(), ddp=("default", cap))
