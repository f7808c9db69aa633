"""Parameters after updates on GPUs, under every strategy, against one process on the CPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from course_lib.launch import run
from course_lib.train import accumulate, wrap
from course_lib.train.data import count_of
from course_lib.train.reference import reference
from course_lib.train.reference_stale import delayed_reference, local_reference
from tests.gpu.given import DEVICE, FABRIC, exact, moved, on
from tests.train.cases import CASES, make_model, make_optimizer, state, windows

pytestmark = pytest.mark.gpu

MICRO, SMALL = 2, {"bucket_mb": 0.0004, "first_bucket_mb": None}
OUTER = (0.7, 0.9)
WAYS = {"serial": ("serial", {}), "serial, flat": ("serial", {"flat": True}), "no_sync": ("no_sync", {}),
        "bucketed": ("bucketed", SMALL), "bucketed, sum": ("bucketed", SMALL | {"op": "sum"}),
        "bucketed, copies": ("bucketed", SMALL | {"gradient_as_bucket_view": False}), "ddp": ("ddp", SMALL),
        "every_step": ("every_step", SMALL), "step_per_bucket": ("step_per_bucket", SMALL),
        "delayed": ("delayed", SMALL | {"delay": 1}), "delayed by two": ("delayed", SMALL | {"delay": 2}),
        "local_sgd": ("local_sgd", {"every": 2}), "diloco": ("diloco", {"every": 2}),
        "zero1": ("zero1", {}), "zero2": ("zero2", {}), "zero3": ("zero3", {})}
EVERY = ("serial", "every_step", "zero2", "zero3")
MODELS = ("equal", "tied", "frozen", "unused", "odd sizes", "ragged tail", "bf16", "mixed types", "checkpointed")


def wrapped(name: str, model: torch.nn.Module, unused: bool = False):
    """The model under a strategy, and an optimizer for it."""
    strategy, options = WAYS[name]
    finds = {} if strategy in ("serial", "no_sync", "local_sgd", "diloco") else {"find_unused": unused}
    model = wrap(strategy, model, **options, **finds)
    params = model.shards() if strategy.startswith("zero") else [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(params)
    if hasattr(model, "take_optimizer"):
        model.take_optimizer(optimizer)
    return model, optimizer


def trained(name: str, case_name: str) -> dict[str, torch.Tensor]:
    case, rank, (strategy, options) = CASES[case_name], dist.get_rank(), WAYS[name]
    model, optimizer = wrapped(name, make_model(case_name, seed=rank).to(DEVICE), case.unused)
    for window in windows(case_name, rank, MICRO):
        counts = [count_of(batch) for batch in window] if case.ragged else None
        accumulate(model, moved(window), case.loss_of, case.normalise, counts, options.get("op", "mean"),
                   every=strategy in EVERY)
        if not getattr(model, "steps_itself", False):
            optimizer.step()
        optimizer.zero_grad()
    for _ in model.flush() if strategy == "delayed" else ():
        optimizer.step()
        optimizer.zero_grad()
    with model.gathered() if strategy.startswith("zero") else nullcontext():
        return moved(state(model.module), "cpu")


def every_model(name: str) -> dict[str, dict[str, torch.Tensor]]:
    exact()
    return {case: trained(name, case) for case in MODELS}


def wanted(name: str, case_name: str, ranks: int) -> list[dict[str, torch.Tensor]]:
    """Of one process on the CPU, a dictionary a rank."""
    case, (strategy, options) = CASES[case_name], WAYS[name]
    given = (lambda: make_model(case_name), list(zip(*[windows(case_name, rank, MICRO) for rank in range(ranks)])),
             case.loss_of, make_optimizer)
    if strategy in ("local_sgd", "diloco"):
        return local_reference(*given, 2, case.normalise, OUTER if strategy == "diloco" else None)
    if strategy == "delayed":
        return [delayed_reference(*given, options["delay"], case.normalise)] * ranks
    return [reference(*given, case.normalise)] * ranks


@pytest.mark.parametrize("ranks", on(1, 2, 8))
@pytest.mark.parametrize("name", WAYS)
def test_parameters_are_those_of_one_process_on_the_cpu(name: str, ranks: int) -> None:
    found = run(every_model, name, ranks=ranks, fabric=FABRIC)
    for case in MODELS:
        for rank, want in enumerate(wanted(name, case, ranks)):
            torch.testing.assert_close(found[rank][case], want, rtol=1e-4, atol=max(1e-4, CASES[case].atol),
                                       msg=lambda said, where=f"{case}, rank {rank}": f"{where}: {said}")
