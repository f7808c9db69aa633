"""Each layer over 1, 2 and 4 ranks against the unsharded one in one process: outputs and all gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.launch import run
from course_lib.tensor import (
    ColumnParallel,
    RowParallel,
    VocabParallelEmbedding,
    all_gather,
    collect,
    finish_replicated_gradients,
    full_state,
    parallel_attention,
    parallel_mlp,
    reduce_scatter,
    sequence_parallel,
    split,
)
from course_lib.tensor import copy as copy_to
from course_lib.train.gpt import Block, GPTConfig
from tests.tensor.given import ROWS, TIME, apart, every_degree, numbers, rough

WIDTH, OUTER = 16, 24
SEQUENCE = {"tensor": {}, "sequence": {"sequence_parallel": True}, "chunked": {"sequence_parallel": True, "chunks": 2}}


class Attention(nn.Module):
    """The attention of a block between two norms, as it stands in the model."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.block = Block(GPTConfig(heads=4, width=WIDTH))
        if not bias:
            self.block.qkv, self.block.out = nn.Linear(WIDTH, 3 * WIDTH, False), nn.Linear(WIDTH, WIDTH, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block._attend(self.block.norm1(x))


class MLP(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block.down(F.gelu(self.block.up(self.block.norm2(x))))


class Pair(nn.Module):
    """A column- and a row-parallel layer with nothing but a nonlinearity between."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, OUTER, bias), nn.Linear(OUTER, WIDTH - 1, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def cut(module: nn.Module, group: dist.ProcessGroup | None, how: dict) -> nn.Module:
    if isinstance(module, Pair):
        module.first = ColumnParallel.shard(module.first, group, **how)
        module.second = RowParallel.shard(module.second, group, **how)
        return module
    (parallel_mlp if isinstance(module, MLP) else parallel_attention)(module.block, group, **how)
    if how:
        sequence_parallel(module.block.norm1, group)
        sequence_parallel(module.block.norm2, group)
    return module


def gradients(module: nn.Module) -> dict:
    return {name: param.grad for name, param in module.named_parameters()}


def every_pair(group: dist.ProcessGroup) -> dict:
    wrong = {}
    for kind in (Pair, MLP, Attention):
        for bias in (True, False):
            for name, how in SEQUENCE.items():
                whole, ours = rough(kind(bias)), cut(rough(kind(bias)), group, how)
                a, b = (numbers(ROWS, TIME, WIDTH).requires_grad_() for _ in range(2))
                want = whole(a)
                weights = numbers(*want.shape, seed=1)
                (want * weights).sum().backward()
                got = collect(ours(split(b, 1, group)), 1, group) if how else ours(b)
                (got * weights).sum().backward()
                finish_replicated_gradients(ours)
                wrong[kind.__name__, bias, name] = apart(
                    {"y": got, "x": b.grad, **full_state(ours, gradients=True)},
                    {"y": want, "x": a.grad, **gradients(whole)})
    return wrong


def test_pairs_equal_the_unsharded_layers() -> None:
    for found in run(every_degree, every_pair, ranks=4, fabric="loopback"):
        assert list(found) == [1, 2, 4]
        for wrong in found.values():
            assert len(wrong) == 18 and not any(wrong.values()), found


def without_the_sum() -> tuple[dict, dict, dict]:
    """What a sequence-parallel MLP gets wrong without `finish_replicated_gradients`, and whether ranks agree after."""
    torch.set_num_threads(1)
    whole, ours = rough(MLP(True)), cut(rough(MLP(True)), None, SEQUENCE["sequence"])
    whole(numbers(ROWS, TIME, WIDTH)).sum().backward()
    ours(split(numbers(ROWS, TIME, WIDTH), 1, None)).sum().backward()
    before = apart(full_state(ours, gradients=True), gradients(whole))
    finish_replicated_gradients(ours)
    return before, apart(full_state(ours, gradients=True), gradients(whole)), {
        name: param.grad for name, param in ours.named_parameters() if "norm2" in name or name.endswith("down.bias")}


def test_replicated_parameters_need_their_gradients_summed() -> None:
    first, second = run(without_the_sum, ranks=2, fabric="loopback")
    for before, after, _ in (first, second):
        assert set(before) == {"block.norm2.weight", "block.norm2.bias", "block.down.bias"}
        assert not after
    assert len(first[2]) == 3 and all(torch.equal(first[2][name], second[2][name]) for name in first[2])


def regions(group: dist.ProcessGroup) -> dict:
    """Each crossing against the same computation on whole tensors, and the pairs against each other."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    wrong = {}

    def compare(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        wrong.update({f"{name} {k}": v for k, v in apart({"": got}, {"": want}).items()})

    for dim in (0, 1, -1):
        mine = [numbers(4, 4, 4, seed=r) for r in range(ranks)]
        weights = [numbers(*(torch.cat(mine, dim)).shape, seed=10 + r) for r in range(ranks)]
        x = mine[rank].clone().requires_grad_()
        y = all_gather(x, dim, group)
        compare("gather", y, torch.cat(mine, dim))
        (y * weights[rank]).sum().backward()
        compare("gather, back", x.grad, sum(weights).chunk(ranks, dim)[rank])
        x = mine[rank].clone().requires_grad_()
        y = reduce_scatter(x, dim, group)
        compare("scatter", y, sum(mine).chunk(ranks, dim)[rank])
        small = [w.chunk(ranks, dim)[r].chunk(ranks, dim)[r] for r, w in enumerate(weights)]
        (y * small[rank]).sum().backward()
        compare("scatter, back", x.grad, torch.cat(small, dim))
        x = mine[0].clone().requires_grad_()
        compare("split and collect", collect(split(x, dim, group), dim, group), x)
        (collect(split(x, dim, group), dim, group) * mine[-1]).sum().backward()
        compare("split and collect, back", x.grad, mine[-1])
    x = mine[0].clone().requires_grad_()
    (copy_to(x, group) * mine[rank]).sum().backward()
    compare("copy, back", x.grad, sum(mine))
    return wrong


def test_regions_and_their_conjugates() -> None:
    assert run(every_degree, regions, ranks=4, fabric="loopback") == [{1: {}, 2: {}, 4: {}}] * 4


def refused() -> dict[str, str]:
    def said(make) -> str:
        try:
            make()
        except ValueError as error:
            return str(error)
        return "nothing"

    sequence = {"sequence_parallel": True}
    return {
        "outputs": said(lambda: ColumnParallel.shard(nn.Linear(4, 7), None)),
        "blocks": said(lambda: ColumnParallel.shard(nn.Linear(4, 9), None, blocks=3)),
        "no blocks": said(lambda: ColumnParallel.shard(nn.Linear(4, 10), None, blocks=3)),
        "inputs": said(lambda: RowParallel.shard(nn.Linear(7, 4), None)),
        "rows": said(lambda: ColumnParallel.shard(nn.Linear(4, 4), None, **sequence, chunks=0)(torch.ones(2, 4))),
        "chunks": said(lambda: RowParallel.shard(nn.Linear(4, 4), None, chunks=2)),
        "time": said(lambda: RowParallel.shard(nn.Linear(8, 4), None, **sequence)(torch.ones(3, 4))),
        "split": said(lambda: split(torch.ones(3, 4), 0, None)),
        "padding": said(lambda: VocabParallelEmbedding.shard(nn.Embedding(4, 4, padding_idx=0), None)),
    }


def test_misuse_is_refused_with_what_to_do() -> None:
    for said in run(refused, ranks=2, fabric="loopback"):
        assert "outputs of a column-parallel layer = 7" in said["outputs"] and "multiple of 2" in said["outputs"]
        assert "10 outputs are no 3 blocks" in said["no blocks"]
        assert "= 3" in said["blocks"] and "inputs of a row-parallel layer = 7" in said["inputs"]
        assert "chunks=0" in said["rows"] and "sequence_parallel=True" in said["chunks"]
        assert "length of the sequence = 3" in said["time"] and "dimension 0" in said["split"]
        assert "padding_idx" in said["padding"]
