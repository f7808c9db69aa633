"""Profiles, alternation, sweeps and calibration on short runs; their figures are benchmarks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from course_lib.launch import Fabric, RankFailed, run
from course_lib.link_cost import LinkCost
from course_lib.tune import Load, calibrate, compare, sweep
from course_lib.tune.sweep import tiny_micro_step

WIRE = Fabric(gbit=1.0, latency_us=1000, kind="paced")
LINK = LinkCost(0.001, 8e-9)


def small_load(r: float = 0.5) -> Load:
    return calibrate(r, WIRE, layers=4, gradient_mb=2.0, link=LINK)


def test_calibrate_sizes_compute_from_the_wire():
    load = small_load()
    assert (load.forward_ms + load.backward_ms) * 1e-3 * 0.5 == pytest.approx(LINK.cost(2 * 2**20))
    model = load.model()
    assert model.backward_ms == pytest.approx(load.backward_ms) and model.forward_ms == pytest.approx(load.forward_ms)
    assert sum(p.numel() * 4 for p in model.parameters()) == 2 * 2**20


def test_calibrate_divides_compute_among_micro_steps():
    whole, quarter = small_load(), calibrate(0.5, WIRE, layers=4, gradient_mb=2.0, link=LINK, micro_steps=4)
    assert quarter.backward_ms == pytest.approx(whole.backward_ms / 4)


def test_the_gpt_profile_keeps_its_shape_and_hits_r():
    load = calibrate(1.0, WIRE, profile="gpt", link=LINK)
    model = load.model()
    sizes = [sum(p.numel() * 4 for p in layer.parameters()) for layer in model]
    assert max(sizes) == sizes[0]  # the embedding is first in forward, so its gradient is ready last
    assert (model.forward_ms + model.backward_ms) * 1e-3 == pytest.approx(LINK.cost(sum(sizes)), rel=1e-3)


@pytest.mark.parametrize("arguments, says", [
    ({"target_r": 5.0}, "between 0.2 and 2"),
    ({"target_r": 1.0, "profile": "bert"}, "choose one of equal, gpt"),
    ({"target_r": 1.0, "ranks": 1}, "a rank alone sends nothing"),
])
def test_calibrate_refuses_what_teaches_nothing(arguments, says):
    with pytest.raises(ValueError, match=says):
        calibrate(**arguments, link=LINK)


def profile_of(make):
    from course_lib.tune.profile import gradient_profile
    return gradient_profile(make(), tiny_micro_step, repeats=3)


@pytest.mark.timing
def test_profile_is_in_ready_order_and_the_same_on_every_rank():
    load = small_load()
    first, second = run(profile_of, load.model, ranks=2, fabric="loopback")
    assert first == second
    assert [n.split(".")[0] for n in first.names] == ["3", "2", "1", "0"]
    assert set(first.bytes) == {2**19}
    layer = load.backward_ms / 4e3
    gaps = [b - a for a, b in zip((0.0, *first.ready_s), first.ready_s)]
    assert all(0.5 * layer < g < 2 * layer for g in gaps)


@pytest.mark.timing
def test_profile_is_the_slowest_rank():
    def make():
        import torch.distributed as dist

        from course_lib.train import emulated
        return emulated.equal(2, 0.1, 1, 5 + 15 * dist.get_rank())

    profile = run(profile_of, make, ranks=2, fabric="loopback")[0]
    assert profile.ready_s[0] > 0.015 and profile.Tb > 0.035


def test_profile_refuses_a_model_that_has_nothing_to_reduce():
    def frozen():
        model = nn.Linear(4, 4)
        return model.requires_grad_(False)

    def unused():
        model = nn.Linear(4, 4)
        model.extra = nn.Parameter(torch.zeros(3))
        return model

    with pytest.raises(RankFailed, match="nothing to tune"):
        run(profile_of, frozen, ranks=1, fabric="loopback")
    with pytest.raises(RankFailed, match="no gradient reached extra"):
        run(profile_of, unused, ranks=1, fabric="loopback")


def test_alternation_gives_every_variant_every_turn():
    def turns():
        from course_lib.tune.alternate import Step, alternate
        seen: list[str] = []
        steps = {name: Step(lambda name=name: seen.append(name)) for name in "abc"}
        seconds, lines = alternate(steps, repeats=3, warmup=1)
        return seen, seconds, {n: line.steps for n, line in lines.items()}

    seen, seconds, steps = run(turns, ranks=2, fabric="loopback")[0]
    assert ["".join(seen[i:i + 3]) for i in range(0, 12, 3)] == ["abc", "bca", "cab", "abc"]
    assert {n: len(s) for n, s in seconds.items()} == {"a": 3, "b": 3, "c": 3}
    assert steps == {"a": [0, 1, 2], "b": [0, 1, 2], "c": [0, 1, 2]}


@pytest.fixture(scope="module")
def small_sweep():
    load = calibrate(1.0, WIRE, layers=8, gradient_mb=8.0, link=LINK)
    return sweep(load.model, caps_mb=(2, 8), fabric=WIRE, repeats=3, ddp=("default",))


def test_sweep_measures_every_variant_on_every_rank(small_sweep):
    assert list(small_sweep.measured) == ["compute", "comm", "serial", "2 MB", "8 MB", "plan", "ddp default"]
    for one in small_sweep.measured.values():
        assert len(one.seconds) == 3 and one.timeline.ranks == [0, 1]
    assert "emulated device" in small_sweep.measured["plan"].timeline.provenance
    assert "1 Gbit/s" in small_sweep.measured["plan"].timeline.provenance


def test_sweep_counts_one_collective_a_bucket(small_sweep):
    for name, buckets in (("serial", 1), ("2 MB", 4), ("8 MB", 1), ("plan", len(small_sweep.plan))):
        line = small_sweep.measured[name].timeline.select(rank=0, kind="comm", step=1)
        assert len(line) == buckets, name
        assert sum(s.bytes for s in line) == 8 * 2**20


def test_buckets_hide_what_serial_exposes(small_sweep):
    serial, bucketed = small_sweep.measured["serial"], small_sweep.measured["2 MB"]
    assert serial.exposed_s == pytest.approx(small_sweep.Tm, rel=0.3)
    assert bucketed.exposed_s < 0.8 * serial.exposed_s
    assert small_sweep.fair_score("serial").value == pytest.approx(0.0, abs=1e-9)


def test_points_are_what_the_curve_draws(small_sweep):
    points = small_sweep.points()
    assert [p[0] for p in points] == [2, 8]
    assert all(low <= median <= high for _, median, low, high in points)


def test_sweep_refuses_a_bucket_of_nothing():
    with pytest.raises(ValueError, match="give sizes above 0"):
        sweep(small_load().model, caps_mb=(0,))


def test_compare_runs_any_strategy():
    found = compare(small_load().model, {"once": ("no_sync", {}), "every": ("serial", {"flat": True})}, fabric=WIRE,
                    repeats=2, micro_steps=3)
    once, every = (len(found[n].timeline.select(rank=1, kind="comm", step=0)) for n in ("once", "every"))
    assert (once, every) == (1, 1)  # no_sync holds for both: the serial strategy sends after the last micro-step


def test_sweep_works_on_a_real_model():
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def micro_step(module):
        return module(torch.ones(32, 64)).square().mean()

    found = sweep(model, caps_mb=(0.1,), fabric=WIRE, repeats=2, micro_step=micro_step)
    assert found.measured["plan"].timeline.provenance.startswith("measured (cpu)")
    assert found.measured["compute"].exposed_s == 0
    assert {s.kind for s in found.measured["0.1 MB"].timeline} >= {"compute", "comm", "step", "fill"}
