"""The training command on ranks: right for every strategy, and as if it had never stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from course_lib.job.options import Options
from course_lib.job.piped import _buckets
from course_lib.launch import run
from tests.job.runs import alone, differs, not_the_same, options, several, whole_and_in_two


def test_a_stage_has_no_more_buckets_than_parameters() -> None:
    """Their number is in the schedule, which is proved action by action."""
    stage = torch.nn.Linear(512, 512)
    assert [_buckets(stage, mb) for mb in (1e-9, 5e-324, 0.6, 100.0, float("inf"))] == [2, 2, 2, 1, 1]


SGD = {"optimizer": "sgd", "lr": 0.1}
"""AdamW divides by the size of a gradient, and so magnifies what summing in another order does."""
WRAPPED = ("serial", "no_sync", "bucketed", "every-step", "zero1", "zero2", "zero3")
EXACT = {name: {"strategy": name, "layers": 1} for name in WRAPPED}
EXACT |= {"tp": {"tp": 2}, "pp": {"pp": 2}}
APART = {"local-sgd": {"strategy": "local-sgd", "local_steps": 2}, "diloco": {"strategy": "diloco", "local_steps": 2},
         **{scheme: {"compress": scheme, "layers": 1} for scheme in ("onebit", "powersgd")}}
"""These come to another result than one process does, but always to the same."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Options]:
    """Every strategy on two ranks, three updates in one go and after a pause."""
    folder = tmp_path_factory.mktemp("runs")
    made = {name: options(folder / name, **SGD, **how) for name, how in EXACT.items()}
    made |= {name: options(folder / name, **how) for name, how in APART.items()}
    run(whole_and_in_two, list(made.values()), ranks=2, fabric="loopback")
    return made


def test_every_strategy_ends_where_one_process_does(runs: dict[str, Options]) -> None:
    wanted: dict[tuple, tuple] = {}
    for name in EXACT:
        key = runs[name].layers, runs[name].laid_out(2).global_batch
        if key not in wanted:
            wanted[key] = alone(runs[name], 2)
        assert not differs(runs[name], wanted[key]), name


@pytest.mark.parametrize("name", [*EXACT, *APART])
def test_a_run_with_a_pause_is_the_whole_run_to_the_bit(runs: dict[str, Options], name: str) -> None:
    assert not_the_same(runs[name]) == []


def test_a_run_goes_on_with_the_rates_that_are_asked_for_then(tmp_path: Path) -> None:
    one = options(tmp_path, strategy="diloco", local_steps=2, steps=2)
    run(several, [one, replace(one, steps=4, lr=1e-3, outer_lr=0.2)], ranks=1, fabric="loopback")
    saved = torch.load(tmp_path / "checkpoints" / "step-00000004" / "rank-0.pt", weights_only=True)
    inner, outer = saved["optimizer"]["groups"], saved["round"]["outer"]["param_groups"]
    assert (inner[0]["lr"], outer[0]["lr"]) == (1e-3, 0.2)


MORE = [{"recompute": True}, {"untied": True, "strategy": "zero3"}, {"compress": "bf16"}, {"compress": "topk"},
        {"bf16": True}, {"bf16": True, "pp": 2}, {"optimizer": "adamw", "strategy": "zero2"},
        {"strategy": "local-sgd", "local_steps": 3}]


@pytest.mark.slow
def test_more_runs_with_a_pause_on_two_ranks(tmp_path: Path) -> None:
    made = [options(tmp_path / str(i), **how) for i, how in enumerate(MORE)]
    run(whole_and_in_two, made, ranks=2, fabric="loopback")
    assert [not_the_same(one) for one in made] == [[]] * len(made)


LAYOUTS = [{}, {"strategy": "every-step"}, {"strategy": "zero3"}, {"pp": 2, "tp": 2}, {"pp": 2}, {"tp": 2},
           {"tp": 2, "strategy": "every-step"}, {"tp": 2, "sequence_parallel": True},
           {"pp": 2, "tp": 2, "sequence_parallel": True, "layers": 4, "pipeline": "interleaved"},
           *({"pp": 2, "layers": 4, "pipeline": name, "untied": untied}
             for name in ("gpipe", "interleaved", "zero-bubble", "zb-v") for untied in (False, True))]


@pytest.mark.slow
def test_layouts_of_four_ranks_end_where_one_process_does(tmp_path: Path) -> None:
    made = [options(tmp_path / str(i), **SGD, **how) for i, how in enumerate(LAYOUTS)]
    run(whole_and_in_two, made, ranks=4, fabric="loopback")
    assert [differs(one, alone(one, 4)) for one in made] == [{}] * len(made)
    assert [not_the_same(one) for one in made] == [[]] * len(made)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks_and_another_strategy(tmp_path: Path) -> None:
    """Every strategy that keeps one state for all replicas reads what any other wrote; B stays."""
    want = alone(options(tmp_path, **SGD), 2)
    for first, then in (("zero2", "bucketed"), ("bucketed", "zero3"), ("every-step", "zero1")):
        one = options(tmp_path / first, **SGD, strategy=first, global_batch=8)
        run(several, [replace(one, steps=2)], ranks=2, fabric="loopback")
        run(several, [replace(one, strategy=then)], ranks=1, fabric="loopback")
        assert not differs(one, want), (first, then)
