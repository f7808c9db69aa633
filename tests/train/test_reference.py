"""Every strategy ends where the single-process reference ends, on 1 to 4 ranks."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist

from course_lib.launch import run
from course_lib.train.data import count_of
from course_lib.train.ddp import wrap
from course_lib.train.reference import reference
from course_lib.train.window import accumulate
from tests.train.cases import CASES, make_model, make_optimizer, state, windows

SMALL = 0.0004
"""MB: about 400 bytes, so that even these models have several buckets. A few large ones are covered too."""

STRATEGIES = {
    "serial": ("serial", {}),
    "no_sync": ("no_sync", {}),
    "bucketed": ("bucketed", {"bucket_mb": SMALL, "first_bucket_mb": SMALL / 4}),
    "bucketed sum": ("bucketed", {"bucket_mb": SMALL, "op": "sum"}),
    "ddp": ("ddp", {"bucket_mb": SMALL, "first_bucket_mb": None}),
}
VARIANTS = {
    "serial flat": ("serial", {"flat": True}),
    "serial sum": ("serial", {"op": "sum"}),
    "no_sync sum": ("no_sync", {"op": "sum"}),
    "bucketed one bucket": ("bucketed", {}),
    "bucketed copies": ("bucketed", {"bucket_mb": SMALL, "gradient_as_bucket_view": False}),
}
"""These run on two ranks only; nothing in them depends on the number."""


def train(case_name: str, strategy: str, micro_steps: int, set_to_none: bool) -> dict[str, torch.Tensor]:
    name, options = {**STRATEGIES, **VARIANTS}[strategy]
    case, rank = CASES[case_name], dist.get_rank()
    if name in ("bucketed", "ddp"):
        options = {**options, "find_unused": case.unused}
    model = wrap(name, make_model(case_name, seed=rank), **options)  # rank 0's parameters must win
    optimizer = make_optimizer(p for p in model.parameters() if p.requires_grad)
    for window in windows(case_name, rank, micro_steps):
        counts = [count_of(b) for b in window] if case.ragged else None
        accumulate(model, window, case.loss_of, case.normalise, counts, op=options.get("op", "mean"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return state(model.module)


def everything(micro_steps: int) -> dict:
    torch.set_num_threads(1)
    return {(case, strategy): train(case, strategy, micro_steps, set_to_none=micro_steps > 1 or CASES[case].unused)
            for case in CASES for strategy in [*STRATEGIES, *(VARIANTS if dist.get_world_size() == 2 else ())]}


SHOWN, MORE = [(1, 3), (2, 3), (4, 3)], [(1, 1), (2, 1), (3, 3)]
RUNS = [*SHOWN, *(pytest.param(r, marks=pytest.mark.slow) for r in MORE)]


@pytest.fixture(scope="module", params=RUNS, ids=lambda r: f"{r[0]} ranks, N={r[1]}")
def trained(request) -> tuple[int, int, list[dict]]:
    """Ranks, micro-steps, and on every rank the parameters by (case, strategy)."""
    ranks, micro_steps = request.param
    return ranks, micro_steps, run(everything, micro_steps, ranks=ranks, fabric="loopback")


@cache
def expected(case_name: str, ranks: int, micro_steps: int) -> dict[str, torch.Tensor]:
    case = CASES[case_name]
    per_rank = [windows(case_name, r, micro_steps) for r in range(ranks)]
    return reference(lambda: make_model(case_name), list(zip(*per_rank)), case.loss_of, make_optimizer, case.normalise)


@pytest.mark.parametrize("case", CASES)
def test_parameters_equal_the_reference(case: str, trained: tuple[int, int, list[dict]]) -> None:
    ranks, micro_steps, results = trained
    want, start = expected(case, ranks, micro_steps), state(make_model(case))
    assert any(not torch.equal(want[n], start[n]) for n in want), "nothing was learnt, so nothing is compared"
    for strategy in {s for c, s in results[0] if c == case}:
        got = [r[case, strategy] for r in results]
        for name, tensor in want.items():
            for rank, parameters in enumerate(got):
                where = f"{strategy}, {name}, rank {rank}"
                torch.testing.assert_close(parameters[name], got[0][name], rtol=0, atol=0, msg=f"replicas: {where}")
                torch.testing.assert_close(parameters[name], tensor, rtol=1e-5, atol=CASES[case].atol,
                                           msg=lambda m, where=where: f"{where}: {m}")
