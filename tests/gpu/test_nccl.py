"""Ranks over NCCL. `make test-gpu`; every test says which GPUs it needs and skips without them."""

from __future__ import annotations

import pytest

from course_lib.launch import run
from course_lib.launch.fabric import gpus
from tests.gpu.given import DEVICE, FABRIC, exact, on

pytestmark = pytest.mark.gpu


def one_all_reduce():
    import torch
    import torch.distributed as dist
    t = torch.full((3,), float(dist.get_rank()), device=DEVICE)
    dist.all_reduce(t)
    return t.tolist()


@pytest.mark.parametrize("ranks", on(1, 2, 8))
def test_ranks_join_over_nccl(ranks):
    assert run(one_all_reduce, ranks=ranks, fabric=FABRIC) == [[float(sum(range(ranks)))] * 3] * ranks


def gradients(strategy: str, options: dict, device: str):
    import torch
    import torch.distributed as dist
    from torch import nn

    from course_lib.train.ddp import wrap
    exact()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 7)).to(device)
    wrapped = wrap(strategy, model, **options)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(5, 33).to(device)
    for _ in range(3):
        wrapped.zero_grad(set_to_none=False)
        with wrapped.no_sync():
            wrapped(x).square().mean().backward()
        wrapped(2 * x).square().mean().backward()
        wrapped.finish_gradient_synchronization()
    return [p.grad.cpu() for p in model.parameters()]


@pytest.mark.parametrize("ranks", on(1, 2, 8))
@pytest.mark.parametrize("strategy, options", [
    ("serial", {}), ("no_sync", {}), ("ddp", {}), ("every_step", {"bucket_mb": 0.005, "first_bucket_mb": None}),
    ("bucketed", {"bucket_mb": 0.005, "first_bucket_mb": None})])
def test_every_strategy_has_the_gradients_of_ddp_there_and_on_the_cpu(ranks, strategy, options):
    import torch
    ours = run(gradients, strategy, options, DEVICE, ranks=ranks, fabric=FABRIC)
    beside = run(gradients, "ddp", {}, DEVICE, ranks=ranks, fabric=FABRIC)
    theirs = run(gradients, "ddp", {}, "cpu", ranks=ranks, fabric="loopback")
    for mine, ddp, cpu in zip(ours, beside, theirs):
        torch.testing.assert_close(mine, ddp)
        torch.testing.assert_close(mine, cpu, rtol=1e-4, atol=1e-5)


def test_more_nccl_ranks_than_gpus_are_refused():
    with pytest.raises(ValueError, match="two NCCL ranks never share a GPU"):
        run(one_all_reduce, ranks=gpus() + 1, fabric="nccl")
