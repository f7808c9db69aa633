"""CUDA tensors on an emulated wire: ranks share a GPU, and gloo carries what they compute on streams of their own."""

from __future__ import annotations

import pytest

from course_lib.launch import run
from tests.gpu.given import needs, only_on_gpus

pytestmark = [pytest.mark.gpu, only_on_gpus, needs(1)]


def reduced_on_a_stream():
    """What is reduced is written late on another stream than the default, and read there at once afterwards."""
    import torch
    import torch.distributed as dist
    device = torch.device("cuda", 0)
    seen = []
    for _ in range(5):
        with torch.cuda.stream(torch.cuda.Stream(device)):
            x = torch.zeros(2**20, device=device)
            torch.cuda._sleep(50_000_000)
            x += dist.get_rank() + 1
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            read = x.clone()
        seen.append((float(read.min()), float(read.max())))
    return seen


@pytest.mark.parametrize("fabric", ["loopback", "paced"])
def test_a_wire_waits_for_the_stream_that_writes_and_is_waited_for_by_the_one_that_reads(fabric) -> None:
    assert run(reduced_on_a_stream, ranks=2, fabric=fabric) == [[(3.0, 3.0)] * 5] * 2


def messages():
    import torch
    import torch.distributed as dist
    x = torch.ones(3, device="cuda:0")
    with pytest.raises(ValueError, match="in collectives alone"):
        dist.send(x, 1 - dist.get_rank())


def test_messages_are_refused() -> None:
    run(messages, ranks=2, fabric="loopback")
