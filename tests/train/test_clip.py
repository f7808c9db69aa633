"""Clipping: against torch's own, with tied and sharded parameters, and in the right place on ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from course_lib.launch import run
from course_lib.train.clip import clip_grad_norm, global_norm


def params(scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    out = []
    for i, shape in enumerate([(3,), (2, 4), ()]):
        param = nn.Parameter(torch.ones(shape, dtype=dtype))
        param.grad = torch.full(shape, scale * (i + 1), dtype=dtype)
        out.append(param)
    return out


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 5.0, 100.0])
def test_as_torch_does(max_norm: float) -> None:
    ours, theirs = params(), params()
    norm = clip_grad_norm(ours, max_norm)
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(theirs, max_norm)))
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_a_parameter_listed_twice_counts_once_and_one_without_a_gradient_not_at_all() -> None:
    one, two = params(), params()
    idle = nn.Parameter(torch.ones(3))
    assert clip_grad_norm([*one, one[1], idle], 1.0) == clip_grad_norm(two, 1.0)
    assert torch.equal(one[1].grad, two[1].grad) and idle.grad is None
    assert global_norm([idle]) == 0


def test_half_precision_does_not_overflow() -> None:
    found = params(300.0, torch.float16)  # the square of 300 is more than float16 holds
    assert torch.isfinite(clip_grad_norm(found, 1.0))
    assert global_norm(found) == pytest.approx(1.0, rel=0.01)


def test_what_is_not_finite_is_left_alone() -> None:
    found = params()
    found[0].grad[0] = float("nan")
    before = found[1].grad.clone()
    assert torch.isnan(clip_grad_norm(found, 1.0)) and torch.equal(found[1].grad, before)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_refuses(max_norm: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        clip_grad_norm(params(), max_norm)


def _sharded():
    import torch.distributed as dist

    rank = dist.get_rank()
    whole = torch.arange(1.0, 9.0)
    mine = nn.Parameter(torch.zeros(4))
    mine.grad = whole.chunk(2)[rank].clone()
    norm = clip_grad_norm([mine], 1.0, shards=dist.group.WORLD)
    return float(norm), mine.grad.tolist()


def test_shards_are_clipped_by_the_norm_of_the_whole() -> None:
    (norm, first), (other, second) = run(_sharded, ranks=2, fabric="loopback")
    whole = torch.arange(1.0, 9.0)
    assert norm == other == pytest.approx(float(whole.norm()))
    assert first + second == pytest.approx((whole / whole.norm()).tolist())
