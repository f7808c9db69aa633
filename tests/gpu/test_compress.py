"""Compressed gradients over NCCL, where both phases go on one stream. `make test-gpu`; skips without enough GPUs."""

from __future__ import annotations

import pytest

from course_lib.launch import run
from tests.gpu.given import DEVICE, FABRIC, exact, on

pytestmark = pytest.mark.gpu


def gradients(kind: str, device: str):
    import torch.distributed as dist

    from course_lib.compress import SCHEMES
    from tests.compress.given import OPTIONS, Given, train, wrapped_with
    exact()
    out = {}
    for scheme, options in OPTIONS.items():
        model = Given().to(device)
        state = SCHEMES[scheme](model, **options)
        moved = train(wrapped_with(state, model, kind), dist.get_rank(), range(4),
                      lambda grads, _: {n: g.to(device) for n, g in grads.items()})
        out[scheme] = [{n: g.cpu() for n, g in grads.items()} for grads in moved], state.updates
    return out


@pytest.mark.parametrize("ranks", on(1, 2, 8))
@pytest.mark.parametrize("kind", ["bucketed", "ddp"])
def test_gradients_over_nccl_are_those_of_the_cpu(ranks, kind) -> None:
    import torch
    theirs = run(gradients, kind, "cpu", ranks=ranks, fabric="loopback")
    for mine, cpu in zip(run(gradients, kind, DEVICE, ranks=ranks, fabric=FABRIC), theirs):
        for scheme, (updates, count) in cpu.items():
            assert mine[scheme][1] == count == 4
            for got, want in zip(mine[scheme][0], updates):
                for name, grad in want.items():
                    largest = float(grad.abs().max()) if grad.numel() else 0.0
                    torch.testing.assert_close(got[name], grad, rtol=1e-3, atol=1e-3 * largest)
