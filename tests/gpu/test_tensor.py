"""Tensor and sequence parallelism on GPUs: loss, norm and every gradient of a GPT are the plain model's on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.launch import run
from course_lib.tensor import finish_replicated_gradients, full_state, global_norm, parallel_gpt
from course_lib.tensor import parallel_next_byte_loss as loss_of
from tests.gpu.given import DEVICE, FABRIC, exact, moved, on
from tests.tensor.given import batch, every_degree, plain
from tests.tensor.test_gpt import HOW, MODELS, frozen_in_part

pytestmark = pytest.mark.gpu


def ours(group: dist.ProcessGroup | None) -> dict:
    """In float64, by model and by how it is cut."""
    exact()
    out = {}
    for kind, config in MODELS.items():
        model = frozen_in_part(**config).to(DEVICE)
        for name, how in HOW.items():
            cut = parallel_gpt(model, group, **how)
            summed, count = loss_of(cut, moved(batch()))
            summed.backward()
            finish_replicated_gradients(cut)
            out[kind, name] = moved({"loss": summed, "norm": global_norm(cut), "count": torch.as_tensor(count),
                                     **full_state(cut, gradients=True)}, "cpu")
    return out


@pytest.mark.parametrize("ranks", on(1, 2, 4, 8))
def test_loss_and_every_gradient_are_those_of_the_plain_model_on_the_cpu(ranks: int) -> None:
    found = run(every_degree, ours, ranks=ranks, fabric=FABRIC)
    assert list(found[0]) == [degree for degree in (1, 2, 4) if degree <= ranks]
    for kind, config in MODELS.items():
        loss, grads = plain(frozen_in_part(**config))
        norm = nn.utils.get_total_norm([grad for name, grad in grads.items() if grad is not None and not (
            name == "head.weight" and kind != "untied")])
        want = {"loss": loss.detach(), "norm": norm, "count": (batch()[1] != -100).sum(), **grads}
        for rank, by_degree in enumerate(found):
            for degree, got in by_degree.items():
                for name in HOW:
                    torch.testing.assert_close(
                        got[kind, name], want, rtol=1e-9, atol=1e-9, check_dtype=False,
                        msg=lambda said, where=f"{kind}, {name}, degree {degree}, rank {rank}": f"{where}: {said}")
