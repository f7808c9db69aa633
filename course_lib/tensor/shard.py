"""Where a parameter is cut, and its parts put together again.

A tensor-parallel layer carries `group`, `shards` (parameter name -> `Shard`) and `partial` (names of parameters that
every rank holds whole but whose gradients every rank knows only in part). Everything that walks a model reads these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Shard:
    """A tensor whose dimension `dim`, of `size` before padding, is cut over the ranks of a group. `blocks` > 1: the
    dimension holds that many matrices one after the other (q, k and v), and each of them is cut."""

    dim: int
    size: int
    blocks: int = 1

    def part(self, full: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """A copy of this rank's part. Zeros are added at the end where `size` is no multiple of `ranks`."""
        blocks = full.detach().movedim(self.dim, -1).unflatten(-1, (self.blocks, -1))
        blocks = F.pad(blocks, (0, -blocks.shape[-1] % ranks))
        mine = blocks.chunk(ranks, dim=-1)[rank].flatten(-2)
        return mine.movedim(-1, self.dim).clone(memory_format=torch.contiguous_format)

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The whole tensor from the parts of all ranks in their order, without the padding."""
        blocks = [p.movedim(self.dim, -1).unflatten(-1, (self.blocks, -1)) for p in parts]
        whole = torch.cat(blocks, dim=-1)[..., :self.size // self.blocks]
        return whole.flatten(-2).movedim(-1, self.dim).contiguous()

    def parameter(self, full: nn.Parameter | None, group: dist.ProcessGroup | None) -> nn.Parameter | None:
        """This rank's part as a parameter, frozen if `full` is."""
        return None if full is None else nn.Parameter(self.part(full, *place(group)), requires_grad=full.requires_grad)


def place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank's place in the group, and the size of the group. Raises `ValueError` on a rank outside it."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group it was given; build layers on its members only")
    return rank, dist.get_world_size(group)


def share(size: int, group: dist.ProcessGroup | None, what: str) -> int:
    """size / ranks. Raises `ValueError` where that leaves a rest; `what` names the size."""
    ranks = place(group)[1]
    if size % ranks:
        raise ValueError(f"{what} = {size} cannot be cut into {ranks} equal parts; choose a multiple of {ranks}")
    return size // ranks


def full_state(model: nn.Module, gradients: bool = False) -> dict[str, torch.Tensor | None]:
    """Every parameter by its name in the unsharded model, put together from all ranks; with `gradients`, their
    gradients instead (None where there is none). Collective call; gives the same on every rank."""
    out = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        value, shard = param.grad if gradients else param.detach(), getattr(module, "shards", {}).get(leaf)
        if shard is not None and value is not None:
            parts = [torch.empty_like(value) for _ in range(place(module.group)[1])]
            mine = value.resolve_conj().resolve_neg().contiguous()
            dist.all_gather(parts, mine, group=module.group)
            value = shard.join(parts)
        out[name] = None if value is None else value.clone()
    return out
