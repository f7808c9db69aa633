"""Linear layers whose matrix is cut over the ranks of a group, by its outputs or by its inputs.

Column after row needs one collective at each end of the pair and none between: up and down of an MLP, qkv and out of
an attention. With `sequence_parallel` the activations outside the pair are cut along the sequence (dimension −2).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.tensor.chunked import gather_linear, linear_scatter
from course_lib.tensor.regions import all_reduce, copy
from course_lib.tensor.shard import Shard, share


class _Parallel(nn.Module):
    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup | None, shards: dict[str, Shard],
                 sequence_parallel: bool, chunks: int) -> None:
        super().__init__()
        if chunks != 1 and not sequence_parallel:
            raise ValueError(f"chunks={chunks} without sequence_parallel=True: only the gather and the scatter of a "
                             "sequence shard are cut into chunks; turn it on, or leave chunks at 1")
        self.group, self.shards, self.partial = group, shards, ()
        self.sequence_parallel, self.chunks = sequence_parallel, chunks
        self.weight = shards["weight"].parameter(linear.weight, group)

    def extra_repr(self) -> str:
        return f"part {tuple(self.weight.shape)}, sequence_parallel={self.sequence_parallel}, chunks={self.chunks}"


class ColumnParallel(_Parallel):
    """Every rank computes a part of the outputs: (…, time, in) to (…, time, out/ranks); with `sequence_parallel`
    from (…, time/ranks, in)."""

    @classmethod
    def shard(cls, linear: nn.Linear, group: dist.ProcessGroup | None, *, blocks: int = 1, pad: bool = False,
              sequence_parallel: bool = False, chunks: int = 1) -> ColumnParallel:
        """This rank's part of `linear`, copied. `blocks`: matrices that lie one after the other in the outputs and
        are cut one by one (3 for qkv). Raises `ValueError` where the ranks do not divide the outputs of a block,
        unless `pad` adds outputs that are zero."""
        if linear.out_features % blocks:
            raise ValueError(f"{linear.out_features} outputs are no {blocks} blocks of equal size; give the number of "
                             "matrices that lie one after the other in them")
        if not pad:
            share(linear.out_features // blocks, group, "the number of outputs of a column-parallel layer")
        cut = Shard(0, linear.out_features, blocks)
        layer = cls(linear, group, {"weight": cut, "bias": cut}, sequence_parallel, chunks)
        layer.bias = cut.parameter(linear.bias, group)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.sequence_parallel:
            return F.linear(copy(x, self.group), self.weight, self.bias)
        y = gather_linear(x, self.weight, self.group, self.chunks)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class RowParallel(_Parallel):
    """Every rank has a part of the inputs, and the products are summed: (…, time, in/ranks) to (…, time, out); with
    `sequence_parallel` to (…, time/ranks, out). Every rank holds the bias, which is added once, after the sum."""

    @classmethod
    def shard(cls, linear: nn.Linear, group: dist.ProcessGroup | None, *, sequence_parallel: bool = False,
              chunks: int = 1) -> RowParallel:
        """This rank's part of `linear`, copied. Raises `ValueError` where the ranks do not divide the inputs."""
        share(linear.in_features, group, "the number of inputs of a row-parallel layer")
        layer = cls(linear, group, {"weight": Shard(1, linear.in_features)}, sequence_parallel, chunks)
        bias = linear.bias
        layer.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        if sequence_parallel and bias is not None:
            layer.partial = ("bias",)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sequence_parallel:
            y = linear_scatter(x, self.weight, self.group, self.chunks)
        else:
            y = all_reduce(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)
