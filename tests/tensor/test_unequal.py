"""What the ranks hand to a collective inside a model: one shape everywhere; what is read, not what lies there."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.launch import run
from course_lib.schedule.experts import exchange_over
from course_lib.tensor import ColumnParallel, RowParallel, all_gather, all_reduce, reduce_scatter

WAYS = {"column": lambda x: ColumnParallel.shard(nn.Linear(4, 4), None, sequence_parallel=True)(x),
        "chunked": lambda x: ColumnParallel.shard(nn.Linear(4, 4), None, sequence_parallel=True, chunks=2)(x),
        "row": lambda x: RowParallel.shard(nn.Linear(8, 4), None, sequence_parallel=True)(x),
        "sum": lambda x: all_reduce(x, None), "gather": lambda x: all_gather(x, -2, None),
        "experts": lambda x: exchange_over(None)(x.movedim(-2, 0))}


def unequal() -> dict[str, str]:
    rank, out = dist.get_rank(), {}
    for (name, way), rows in itertools.product(WAYS.items(), ((4, 6), (3, 4))):
        with pytest.raises(ValueError) as refused:
            way(torch.ones(2, rows[rank], 4))
        out[name, rows] = str(refused.value)
        way(torch.ones(2, 8, 4))  # and all go on together
    with pytest.raises(ValueError, match=r"float32 on rank 0, .* float64 on rank 1"):
        all_reduce(torch.ones(3, dtype=(torch.float32, torch.float64)[rank]), None)
    return out


def test_shards_of_unequal_length_are_refused_on_every_rank_before_anything_is_sent() -> None:
    first, second = run(unequal, ranks=2, fabric="loopback", timeout_s=60)
    assert first == second
    for name, words in first.items():
        assert "on rank 0, " in words and "on rank 1)" in words and "cut the sequence into equal parts" in words, name


def put_off() -> list[torch.Tensor]:
    """A sign and a conjugation that torch has not carried out yet."""
    number = torch.tensor([[1 + 1j], [2 + 3j]]).conj()
    return [crossing(x) for x in (number, number.imag)
            for crossing in (lambda x: all_reduce(x, None), lambda x: all_gather(x, 0, None),
                             lambda x: reduce_scatter(x, 0, None), lambda x: exchange(x))]


def exchange(x: torch.Tensor) -> torch.Tensor:
    result, _, work = exchange_over(None)(x)
    work.wait()
    return result


def test_what_is_sent_is_what_is_read() -> None:
    for rank, found in enumerate(run(put_off, ranks=2, fabric="loopback", timeout_s=60)):
        for at, x in ((0, torch.tensor([[1 - 1j], [2 - 3j]])), (4, torch.tensor([[-1.0], [-3.0]]))):
            for mine, want in zip(found[at:], (2 * x, torch.cat([x, x]), 2 * x[rank:rank + 1],
                                               x[rank:rank + 1].repeat(2, 1))):
                torch.testing.assert_close(mine, want)
