"""The loss of a window: the same tokens give the same update, however they are cut and dealt out."""

from __future__ import annotations

import pytest
import torch

from course_lib.launch import run
from course_lib.train import data
from course_lib.train.gpt import GPT, GPTConfig, next_byte_loss
from course_lib.train.loss import global_tokens, token_factor, updates, windows
from course_lib.train.reference import reference

ROWS, UPDATES = 8, 2


def make():
    torch.manual_seed(0)
    return GPT(GPTConfig(length=16, layers=1, heads=2, width=12))


def optimizer(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


def rows(rank: int):
    return list(data.batches(data.text(0.1), ROWS, 12, UPDATES, seed=3, rank=rank, ragged=True))


def split(batch, N):
    return list(zip(*(part.chunk(N) for part in batch)))


def _train(Ns, op):
    import torch.distributed as dist

    rank, ranks, found = dist.get_rank(), dist.get_world_size(), {}
    for N in Ns:
        model = make()
        stepper = optimizer(model.parameters())
        for batch in rows(rank):
            micro = split(batch, N)
            factor = token_factor([data.count_of(m) for m in micro], op=op)
            for m in micro:
                (next_byte_loss(model, m)[0] * factor).backward()
            for param in model.parameters():
                if param.grad is not None:
                    dist.all_reduce(param.grad)
                    param.grad /= ranks if op == "mean" else 1
            stepper.step()
            stepper.zero_grad()
        found[N] = {n: p.detach() for n, p in model.named_parameters()}
    empty = token_factor([0, 0])
    return found, empty, global_tokens([rank + 1, 10])


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_every_split_gives_the_update_of_one_process(op: str) -> None:
    found, empty, tokens = run(_train, (1, 2, 4, 8), op, ranks=2, fabric="loopback")[0]
    right = reference(make, [[[rows(r)[k]] for r in range(2)] for k in range(UPDATES)], next_byte_loss, optimizer)
    for N, parameters in found.items():
        for name, tensor in parameters.items():
            torch.testing.assert_close(tensor, right[name], rtol=1e-4, atol=1e-5, msg=f"N={N}, {name}")
    assert empty == 0.0 and tokens == 1 + 10 + 2 + 10


def test_windows_and_updates() -> None:
    assert list(windows(list(range(7)), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(windows([], 3)) == []
    for count in range(12):
        for N in range(1, 5):
            assert updates(count, N) == len(list(windows(list(range(count)), N)))
    with pytest.raises(ValueError, match="at least one"):
        list(windows([1], 0))
    with pytest.raises(ValueError, match="at least 1"):
        updates(4, 0)
