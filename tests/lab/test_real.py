"""Updates of a model whose compute is real: here on the CPU, on GPUs in tests/gpu."""

from __future__ import annotations

import pytest

from course_lib import overlap
from course_lib.lab.errors import LabError
from course_lib.lab.workbench.real import real_runs
from course_lib.launch.fabric import gpus

WAYS = {"once": ("no_sync", {}), "at each layer": ("serial", {}), "buckets": ("bucketed", {"bucket_mb": 0.02}),
        "DDP": ("ddp", {}), "every micro-step": ("every_step", {"bucket_mb": 0.02}), "stage 1": ("zero1", {}),
        "stage 2": ("zero2", {}), "stage 3": ("zero3", {})}
TINY = {"length": 8, "layers": 2, "heads": 2, "width": 16}


def test_every_strategy_makes_the_same_updates_and_leaves_a_trace() -> None:
    runs = real_runs(WAYS, device="cpu", fabric="loopback", micro_steps=2, updates=2, shape=TINY)
    assert list(runs) == list(WAYS)
    for name, one in runs.items():
        assert len(one.times_s) == 2 and min(one.times_s) > 0 and one.spread_s >= 0
        assert one.apart < 1e-5, (name, one.apart)
        report = overlap.report(one.trace.timeline)
        assert report.pooled.comm and report.pooled.compute, name
        assert 0 <= one.exposed_ms <= max(row.span for row in report.rows) / 1e6, name
        assert "ms exposed in the profiled one" in one.sentence
    assert runs["once"].apart == 0


def test_what_differs_is_seen() -> None:
    ways = {"once": ("no_sync", {}), "sum": ("no_sync", {"op": "sum"})}
    assert real_runs(ways, device="cpu", fabric="loopback", micro_steps=1, updates=2, shape=TINY)["sum"].apart > 1e-4


def test_a_rank_alone_sends_nothing_in_zero_and_says_so() -> None:
    one = real_runs({"stage 3": ("zero3", {})}, device="cpu", ranks=1, micro_steps=1, updates=2, shape=TINY)["stage 3"]
    assert "nothing was sent" in one.sentence and "exposed" not in one.sentence


def test_a_device_that_is_not_there_is_refused_before_anything_starts() -> None:
    with pytest.raises(LabError, match="this machine shows"):
        real_runs(WAYS, device="cuda", ranks=gpus() + 1)
    with pytest.raises(LabError, match="NCCL does not"):
        real_runs(WAYS, device="cpu", fabric="nccl")
    with pytest.raises(LabError, match="'local_sgd'; choose among serial"):
        real_runs({"local": ("local_sgd", {})}, device="cpu")
    with pytest.raises(LabError, match="choose 'cpu' or 'cuda'"):
        real_runs(WAYS, device="auto")
