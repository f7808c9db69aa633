"""The wire that 11.1 and 11.2 see, in one process and on real ranks, and one pass through what was written there.

It needs nothing of a check but a function for collectives, so that autograd's whole graph is on the side of the code
that is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from course_lib.lab.guard import call

if TYPE_CHECKING:
    from torch import Tensor

OPS = ("all_reduce", "all_gather", "reduce_scatter")

Collective = Callable[[str, str, "Tensor"], "Tensor"]
"""(op, "forward", "backward" or "direct", tensor) to the result on this rank."""


class CrossingWire:
    """What one rank sees: `rank`, `ranks`, `cross` and `all_reduce`."""

    def __init__(self, rank: int, ranks: int, collective: Collective) -> None:
        self.rank, self.ranks, self._collective = rank, ranks, collective

    def cross(self, x: Tensor, forward: str | None = None, backward: str | None = None) -> Tensor:
        """The collective `forward` of x; on the way back, the collective `backward` of the gradient."""
        from course_lib.tensor.regions import cross

        for op in (forward, backward):
            if op is not None and op not in OPS:
                raise ValueError(f"cross takes {', '.join(map(repr, OPS))} or None, not {op!r}")
        refuse_no_tensor(x, "cross")
        return cross(x, partial(self._one_way, op=forward, when="forward"),
                     partial(self._one_way, op=backward, when="backward"))  # fmt: skip

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the ranks."""
        refuse_no_tensor(tensor, "all_reduce")
        tensor.detach().copy_(self._collective("all_reduce", "direct", tensor.detach()))

    def _one_way(self, x: Tensor, op: str | None, when: str) -> Tensor:
        return x.view_as(x) if op is None else self._collective(op, when, x.detach().contiguous())


def one_pass(answer: Any, given: tuple[tuple[str, Tensor], ...], upstream: Tensor, rank: int, ranks: int,
             collective: Collective) -> tuple[Any, dict[str, Tensor | None]]:
    """Forward and backward through `parallel_mlp`, or through an object of `SequenceParallelMLP` and its `finish`.

    `given` holds x and the parameters by name. Returns the output, and the gradients by name; there is no backward pass
    where the output is none. Exceptions of what was written as for `guard.call`."""
    import torch

    with torch.enable_grad():  # whoever calls may be inside another rank's crossing, where it is off
        leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in given}
        p = SimpleNamespace(**{name: leaf for name, leaf in leaves.items() if name != "x"})
        wire, where = CrossingWire(rank, ranks, collective), f"on rank {rank} of {ranks}"
        if isinstance(answer, type):
            block = call(answer, p, wire, shown=f"{answer.__name__}(p, wire) {where}")
            y = call(block.forward, leaves["x"], shown=f"forward(x) {where}")
        else:
            block, y = None, call(answer, leaves["x"], p, wire, shown=f"parallel_mlp(x, p, wire) {where}")
        if isinstance(y, torch.Tensor) and y.requires_grad and y.shape == leaves["x"].shape:
            call(y.backward, upstream.clone(), shown=f"the backward pass {where}")
            if block is not None:
                call(block.finish, shown=f"finish() {where}")
    if isinstance(y, torch.Tensor):
        y = y.detach().clone(memory_format=torch.contiguous_format)
    return y, {name: None if leaf.grad is None else leaf.grad.clone(memory_format=torch.contiguous_format)
               for name, leaf in leaves.items()}


def refuse_no_tensor(x: object, name: str) -> None:
    """Raises `TypeError` for what is no tensor of floating point numbers."""
    import torch

    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} takes a tensor, not {'an integer tensor' if isinstance(x, torch.Tensor) else x!r}")
