"""The production twin: the same GPT cut by PyTorch's own `parallelize_module` and DTensor."""

from __future__ import annotations

import copy

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from course_lib.tensor.shard import share
from course_lib.train.gpt import GPT


def dtensor_gpt(model: GPT, mesh: DeviceMesh, sequence_parallel: bool = False) -> GPT:
    """A copy of `model` cut over a one-dimensional mesh by PyTorch. It gives the whole scores, (batch, time, vocab).

    DTensor cuts the rows of qkv in one go, so they are first put in the order q, k, v of rank 0, q, k, v of rank 1
    and so on; `dtensor_gradients` puts them back. Raises `ValueError` where the ranks do not divide the heads.
    """
    model, ranks = copy.deepcopy(model), mesh.size()
    rows = Shard(1) if sequence_parallel else Replicate()
    for block in model.blocks:
        block.heads = share(block.heads, mesh.get_group(), "the number of heads")
        for param in block.qkv.parameters():
            param.data = _turned(param.data, 3, ranks)
    column, row = ColwiseParallel(input_layouts=rows), RowwiseParallel(output_layouts=rows)
    plan = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
            "head": ColwiseParallel(input_layouts=rows, output_layouts=Replicate()),
            "blocks.*.qkv": column, "blocks.*.out": row, "blocks.*.up": column, "blocks.*.down": row}
    if sequence_parallel:
        norm = SequenceParallel(use_local_output=True)
        plan |= {"norm": norm, "blocks.*.norm1": norm, "blocks.*.norm2": norm,
                 "position": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))}
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    parallelize_module(model, mesh, plan)
    for name in frozen:  # SequenceParallel makes new parameters and forgets that the old ones were frozen
        model.get_parameter(name).requires_grad_(False)
    if model.config.tied:
        model.head.weight = model.embed.weight
    return model


def dtensor_gradients(model: GPT, mesh: DeviceMesh) -> dict[str, torch.Tensor | None]:
    """Every gradient whole, by the names and in the order of the plain model. Collective call."""
    out = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        out[name] = _turned(grad, mesh.size(), 3) if ".qkv." in name and grad is not None else grad
    return out


def _turned(rows: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Rows in `outer` times `inner` blocks, with the two exchanged."""
    return rows.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)
