"""Every collective on real ranks, against one process and against torch.distributed on the same ranks."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

from course_lib.collectives import (
    all_gather_ring,
    all_reduce_doubling,
    all_reduce_hierarchical,
    all_reduce_ring,
    node_groups,
    reduce_scatter_ring,
    segments,
)
from course_lib.launch import RankFailed, run
from tests.collectives.given import part, rough

SIZES = (0, 1, 3, 1009)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
ALL_REDUCES = {"ring": all_reduce_ring, "ring, 1 chunk": functools.partial(all_reduce_ring, chunks=1),
               "ring, 5 chunks": functools.partial(all_reduce_ring, chunks=5), "doubling": all_reduce_doubling}


def two_levels(nodes: int):
    """The hierarchical all-reduce with the ranks dealt to `nodes` nodes in blocks."""
    ranks = dist.get_world_size()
    inner, inter = node_groups([r * nodes // ranks for r in range(ranks)])
    return functools.partial(all_reduce_hierarchical, inner=inner, inter=inter)


def every_all_reduce():
    """(name, dtype, size, op) of results that are wrong on this rank, and a hash of every rough result's bytes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ways = ALL_REDUCES | {f"{nodes} nodes": two_levels(nodes) for nodes in range(1, ranks + 1) if ranks % nodes == 0}
    wrong, bits = [], {}
    for name, way in ways.items():
        for dtype in DTYPES:
            for size in SIZES:
                exact = sum(part(r, size, torch.float64) for r in range(ranks))
                for op in ("sum", "mean") if dtype.is_floating_point else ("sum",):
                    got = part(rank, size, dtype)
                    way(got, op=op)
                    if not torch.equal(got, exact.to(dtype) / (ranks if op == "mean" else 1)):
                        wrong.append((name, dtype, size, op))
        once, again = rough(rank, 10_007), rough(rank, 10_007)
        way(once), way(again)
        theirs = rough(rank, 10_007)
        dist.all_reduce(theirs)
        if not torch.equal(once, again) or not torch.allclose(once, theirs, rtol=1e-5, atol=1e-4):
            wrong.append((name, "against torch"))
        bits[name] = once.numpy().tobytes()
    return wrong, bits


def halves():
    """Reduce-scatter and all-gather apart, against torch's: what is wrong on this rank."""
    rank, ranks, wrong = dist.get_rank(), dist.get_world_size(), []
    for chunks in (1, 2, 3):
        for size in (*SIZES, 24 * ranks):
            flat = part(rank, size)
            reduce_scatter_ring(flat, op="mean", chunks=chunks)
            mine = segments(flat, ranks)[rank]
            if not torch.equal(mine, segments(sum(part(r, size) for r in range(ranks)) / ranks, ranks)[rank]):
                wrong.append(("reduce_scatter", chunks, size))
            if size % ranks == 0:
                out = torch.empty(size // ranks)
                dist.reduce_scatter_tensor(out, part(rank, size))
                if not torch.allclose(out / ranks, mine):
                    wrong.append(("torch's reduce_scatter", chunks, size))
            flat = torch.full((size,), -1.0)
            segments(flat, ranks)[rank].copy_(segments(part(99, size), ranks)[rank])
            all_gather_ring(flat, chunks=chunks)
            if not torch.equal(flat, part(99, size)):
                wrong.append(("all_gather", chunks, size))
    return wrong


def every_collective():
    wrong, bits = every_all_reduce()
    return wrong + halves(), bits


@pytest.mark.parametrize("ranks", [2, 3, 5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_collectives_are_exact_repeatable_and_the_same_on_every_rank(ranks) -> None:
    results = run(every_collective, ranks=ranks, fabric="loopback")
    for wrong, bits in results:
        assert wrong == []
        assert bits == results[0][1]


def test_segments_cover_the_tensor_and_differ_by_one() -> None:
    flat = torch.arange(11)
    assert [s.tolist() for s in segments(flat, 4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]
    assert [s.numel() for s in segments(flat[:2], 3)] == [1, 1, 0]


def shaped_tensors():
    """A tensor of several dimensions, or of complex numbers, is reduced in place; one with strides, the wrong dtype or
    a conjugation that was put off is refused."""
    two_d = torch.ones(3, 5, requires_grad=True)
    all_reduce_ring(two_d)
    messages = []
    for bad, op in ((torch.ones(4, 6).t(), "sum"), (torch.ones(6)[::2], "sum"), (torch.ones(3).long(), "mean"),
                    (torch.ones(3), "max"), (torch.ones(3, dtype=torch.complex64).conj(), "sum")):
        try:
            all_reduce_ring(bad, op=op)
        except ValueError as error:
            messages.append(str(error))
    turned = torch.tensor([1j, 2.0, 3 + 1j]) * (dist.get_rank() + 1)
    all_reduce_ring(turned, op="mean")
    return two_d.detach(), turned, messages


def test_what_cannot_be_reduced_in_place_is_refused_before_anything_is_sent() -> None:
    for got, turned, messages in run(shaped_tensors, ranks=2, fabric="loopback"):
        assert torch.equal(got, torch.full((3, 5), 2.0))
        assert torch.equal(turned, torch.tensor([1.5j, 3.0, 4.5 + 1.5j]))
        assert [m.split(",")[0].split(":")[0] for m in messages] == [
            "the tensor is not contiguous", "the tensor is not contiguous",
            "the mean of torch.int64 would be rounded; use op='sum'", "op='max'",
            "the tensor is conjugated or negated when it is read"]


def in_part_of_the_ranks():
    group = dist.new_group([0, 2])
    tensor = torch.full((5,), float(dist.get_rank()))
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="not in the group"):
            all_reduce_ring(tensor, group)
    else:
        all_reduce_ring(tensor, group)
    return tensor[0].item()


def test_a_group_of_some_ranks() -> None:
    assert run(in_part_of_the_ranks, ranks=3, fabric="loopback") == [2.0, 1.0, 2.0]


def uneven_nodes():
    node_groups([0, 0, 1])


def test_nodes_of_different_sizes_are_refused() -> None:
    with pytest.raises(RankFailed, match="nodes of 2, 1 ranks"):
        run(uneven_nodes, ranks=3, fabric="loopback")
