"""Matmuls on the emulated device: how long, in forward and in backward, and with the same numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from course_lib.record import recording
from course_lib.tensor.emulated import EmulatedMatmuls


def test_every_matmul_takes_its_products_of_device_time() -> None:
    x, weight, bias = torch.randn(2, 3, 4), torch.randn(5, 4, requires_grad=True), torch.randn(5)
    want = F.linear(x, weight, bias)
    with recording() as recorder, EmulatedMatmuls(100):
        y = F.linear(x, weight, bias)
        y.sum().backward()
        torch.bmm(x, x.transpose(1, 2))
    assert torch.equal(y, want)
    spans = recorder.timeline().select(kind="compute")
    assert [s.stop - s.start for s in spans] == [100 * 6 * 4 * 5, 100 * 5 * 6 * 4, 100 * 2 * 3 * 4 * 3]
    assert {s.lane for s in spans} == {"device"}


def test_outside_nothing_is_spent_and_a_negative_time_is_refused() -> None:
    with recording() as recorder:
        torch.randn(2, 3) @ torch.randn(3, 2)
    assert not len(recorder.timeline())
    with pytest.raises(ValueError, match="ns_per_product=-1"):
        EmulatedMatmuls(-1)
