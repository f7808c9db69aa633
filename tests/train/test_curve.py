"""Loss curves: what leaves the mathematics alone gives the same curve, what does not gives another."""

from __future__ import annotations

import pytest
import torch

from course_lib.launch import Fabric, run
from course_lib.train.curve import Point, train_text
from course_lib.train.gpt import GPTConfig
from course_lib.train.stepping import TOO_LATE

TINY = GPTConfig(length=16, layers=1, heads=2, width=16)
RUNS = {
    "bucketed": ("bucketed", {"bucket_mb": 0.005, "rebuild": False}),
    "step_per_bucket": ("step_per_bucket", {"bucket_mb": 0.005, "rebuild": False}),
    "ddp": ("ddp", {}),
    "zero1": ("zero1", {}),
    "zero3": ("zero3", {}),
    "delayed": ("delayed", {"delay": 2, "bucket_mb": 0.005}),
    "local_sgd": ("local_sgd", {"every": 4}),
    "diloco": ("diloco", {"every": 4}),
}


def curves() -> dict[str, list[Point]]:
    torch.set_num_threads(1)
    out = {name: train_text(*run_, updates=10, config=TINY, micro_steps=2, measure_every=5, held_out=6, max_mb=0.2)
           for name, run_ in RUNS.items()}
    out["for seconds"] = train_text("bucketed", seconds=0.05, config=TINY, micro_steps=1, measure_every=1, held_out=2,
                                    max_mb=0.2)
    return out


@pytest.fixture(scope="module")
def results() -> list[dict[str, list[Point]]]:
    return run(curves, ranks=2, fabric="loopback")


def losses(points: list[Point]) -> list[float]:
    return [point.loss for point in points]


def test_all_ranks_get_the_same_points_and_all_strategies_learn(results) -> None:
    assert results[0] == results[1]
    for name in RUNS:
        points = results[0][name]
        assert [p.update for p in points] == [0, 5, 10], name
        assert points[0].loss == pytest.approx(5.545, abs=0.05), name  # ln 256
        assert points[-1].loss < points[0].loss - 0.2, name
        assert 0 == points[0].seconds < points[1].seconds < points[2].seconds


def test_reordering_leaves_the_curve_alone_and_staleness_does_not(results) -> None:
    got = results[0]
    assert losses(got["step_per_bucket"]) == losses(got["bucketed"])
    for name in ("ddp", "zero1", "zero3"):
        assert losses(got[name]) == pytest.approx(losses(got["bucketed"]), abs=1e-4), name
    for name in ("delayed", "local_sgd", "diloco"):
        assert losses(got[name])[0] == losses(got["bucketed"])[0]
        assert abs(got[name][1].loss - got["bucketed"][1].loss) > 1e-3, name


def test_local_steps_send_a_round_instead_of_a_window(results) -> None:
    full = results[0]["bucketed"][-1].bytes
    for name in ("local_sgd", "diloco"):  # 10 updates: rounds after 4 and 8, and the one cut short
        assert results[0][name][-1].bytes == pytest.approx(full * 3 / 10)


def test_a_limit_in_seconds_ends_at_the_first_point_beyond_it(results) -> None:
    points = results[0]["for seconds"]
    assert points[-1].seconds >= 0.05 > points[-2].seconds and points[-1].update == len(points) - 1


def refused() -> list[str]:
    said = []
    for strategy, options in (("bucketed", {}), ("bucketed", {"updates": 0}), ("bucketed", {"seconds": -1.0}),
                              ("step_per_bucket", {"updates": 1, "max_norm": 1.0})):
        try:
            train_text(strategy, config=TINY, max_mb=0.2, held_out=2, **options)
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    clipped = train_text("bucketed", config=TINY, max_mb=0.2, held_out=2, updates=2, max_norm=0.1)
    return [*said, clipped[-1].update]


def test_no_limit_and_clipping_with_a_step_per_bucket_are_refused() -> None:
    for none, zero, negative, clipping, updates in run(refused, ranks=2, fabric="loopback"):
        assert all("give one limit above 0" in said for said in (none, zero, negative))
        assert TOO_LATE in clipping and updates == 2


GBIT = 0.002


def on_a_slow_wire() -> list[Point]:
    torch.set_num_threads(1)
    return [train_text(name, options, updates=8, config=TINY, micro_steps=1, measure_every=8, held_out=2,
                       max_mb=0.2)[-1] for name, options in (("no_sync", {}), ("local_sgd", {"every": 8}))]


@pytest.mark.slow
def test_on_a_slow_wire_local_steps_save_the_wires_time() -> None:
    window, local = run(on_a_slow_wire, ranks=2, fabric=Fabric(gbit=GBIT, kind="paced"))[0]
    saved = (window.bytes - local.bytes) * 8 / (GBIT * 1e9)
    assert saved > 0.7
    assert window.seconds - local.seconds == pytest.approx(saved, rel=0.4)  # compute is noise beside it
