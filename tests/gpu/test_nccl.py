"""The same strategies over NCCL. `make test-gpu`; every test says which GPUs it needs and skips without them."""

from __future__ import annotations

import pytest

from course_lib.launch import run
from course_lib.launch.fabric import gpus

pytestmark = pytest.mark.gpu


def needs(count: int):
    return pytest.mark.skipif(gpus() < count, reason=f"needs {count} CUDA devices, this machine shows {gpus()}")


def one_all_reduce():
    import torch
    import torch.distributed as dist
    t = torch.full((3,), float(dist.get_rank()), device="cuda")
    dist.all_reduce(t)
    return t.tolist()


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=needs(n)) for n in (1, 2, 8)])
def test_ranks_join_over_nccl(ranks):
    assert run(one_all_reduce, ranks=ranks, fabric="nccl") == [[float(sum(range(ranks)))] * 3] * ranks


def gradients(strategy: str, options: dict):
    import torch
    import torch.distributed as dist
    from torch import nn

    from course_lib.train.ddp import wrap
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 7)).cuda()
    wrapped = wrap(strategy, model, **options)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(5, 33, device="cuda")
    for _ in range(3):
        wrapped.zero_grad(set_to_none=False)
        with wrapped.no_sync():
            wrapped(x).square().mean().backward()
        wrapped(2 * x).square().mean().backward()
        wrapped.finish_gradient_synchronization()
    return [p.grad.cpu() for p in model.parameters()]


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=needs(n)) for n in (1, 2, 8)])
@pytest.mark.parametrize("strategy, options", [
    ("serial", {}), ("no_sync", {}), ("bucketed", {"bucket_mb": 0.005, "first_bucket_mb": None})])
def test_every_strategy_has_the_gradients_of_ddp(ranks, strategy, options):
    import torch
    ours = run(gradients, strategy, options, ranks=ranks, fabric="nccl")
    theirs = run(gradients, "ddp", {}, ranks=ranks, fabric="nccl")
    for mine, ddp in zip(ours, theirs):
        torch.testing.assert_close(mine, ddp)


def test_more_nccl_ranks_than_gpus_are_refused():
    with pytest.raises(ValueError, match="two NCCL ranks never share a GPU"):
        run(one_all_reduce, ranks=gpus() + 1, fabric="nccl")
