"""The rank's side of a learner's stage 3: units of an emulated model that are gathered, used and freed as `run_pass`
says, and whose gradients go through a `ScatterBuckets`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from course_lib import record
from course_lib.collectives import all_gather_ring, reduce_scatter_ring, segments
from course_lib.lab.workbench.gradients import loss_of
from course_lib.lab.workbench.rank import Fault, Refused
from course_lib.lab.workbench.updates import told
from course_lib.lab.workbench.zero import LR
from course_lib.train.sharded_gather import gathering

LIMIT = timedelta(seconds=30)


class OwnUnit:
    """The parameters of one layer as a flat tensor of n equal parts, the last ones filled up with zeros. `shard` is
    what this rank keeps, without the filling."""

    def __init__(self, layer: nn.Module, rank: int, ranks: int) -> None:
        self.params = list(layer.parameters())
        self.shapes, self.sizes = [p.shape for p in self.params], [p.numel() for p in self.params]
        self.size = sum(self.sizes)
        each = -(-self.size // ranks)
        self.flat = torch.zeros(each * ranks)
        self.flat[:self.size] = torch.cat([p.detach().flatten() for p in self.params])
        self._own = segments(self.flat, ranks)[rank]
        self.shard = nn.Parameter(self._own[:max(0, self.size - rank * each)].clone())
        self.whole = True
        self.free()

    def gather(self, group: dist.ProcessGroup) -> dist.Work:
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        self._own.zero_()[:self.shard.numel()].copy_(self.shard.detach())
        return all_gather_ring(self.flat, group, async_op=True)

    def arrived(self) -> None:
        for param, part, shape in zip(self.params, self.flat[:self.size].split(self.sizes), self.shapes):
            param.data = part.view(shape)
        self.whole = True

    def free(self) -> None:
        for param in self.params:
            param.data = param.data.new_empty(0)
        self.flat.untyped_storage().resize_(0)
        self.whole = False


class UnitWire:
    """What `run_pass` sees of the wire."""

    def __init__(self, units: list[OwnUnit]) -> None:
        self._units, self._group = units, gathering(dist.group.WORLD)
        self._coming: dict[int, Coming] = {}

    def gather(self, u: int) -> Coming:
        """Start to gather unit u and return at once."""
        self._known("gather", u)
        if self._units[u].whole:
            return Coming(None, None)
        if u not in self._coming:
            with record.tag(u):
                work = self._units[u].gather(self._group)
            self._coming[u] = Coming(work, lambda: self._arrived(u))
        return self._coming[u]

    def free(self, u: int) -> None:
        """Give the memory of unit u back."""
        self._known("free", u)
        if u in self._coming:
            raise Refused(f"freed unit {u} while it is on its way; wait for it first")
        self._units[u].free()

    def needed(self, u: int) -> None:
        self._known("compute", u)
        if not self._units[u].whole:
            raise Refused(f"computed with unit {u}, whose parameters are not there")

    def _arrived(self, u: int) -> None:
        if self._coming.pop(u, None) is not None:
            self._units[u].arrived()

    def _known(self, what: str, u: int) -> None:
        if u not in range(len(self._units)):
            raise Refused(f"called {what}({u!r}); the units are 0 to {len(self._units) - 1}")


class Coming:
    """The handle of a gather."""

    def __init__(self, work: dist.Work | None, arrived: Callable[[], None] | None) -> None:
        self._work, self._arrived = work, arrived

    def wait(self, timeout: object = None) -> bool:
        """Block until the unit's parameters are there."""
        if self._work is not None and self._arrived is not None:
            self._work.wait(LIMIT)
            self._arrived()
        return True


class PartWire:
    """What `ScatterBuckets` sees of the wire."""

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor) -> Scattering:
        """Start the sum of `whole` over the ranks, of which this rank's part goes into `part`; returns at once."""
        if whole.numel() != self.ranks * part.numel():
            raise Refused(f"handed over {whole.numel()} elements for a part of {part.numel()}; on {self.ranks} ranks "
                          f"it has to be {self.ranks} times as long")
        return Scattering(part, whole, reduce_scatter_ring(whole, async_op=True))


class Scattering:
    """The handle of a reduce-scatter. It lets go of what was sent when that has arrived."""

    def __init__(self, part: torch.Tensor, whole: torch.Tensor, work: dist.Work) -> None:
        self._held: tuple[torch.Tensor, torch.Tensor, dist.Work] | None = (part, whole, work)

    def wait(self, timeout: object = None) -> bool:
        """Block until this rank's part of the sum is there."""
        if self._held is not None:
            part, whole, work = self._held
            work.wait(LIMIT)
            part.copy_(segments(whole, dist.get_world_size())[dist.get_rank()])
            self._held = None
        return True


class Yours:
    """A stage 3 of the learner's pieces. Each layer runs on its own, so that one pass is a list of units."""

    def __init__(self, model: nn.Sequential, ScatterBuckets: type, run_pass: Callable, ahead: int, N: int) -> None:
        self.layers, self.N, self.ahead, self._run_pass = list(model), N, ahead, run_pass
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.units = [OwnUnit(layer, self.rank, self.ranks) for layer in self.layers]
        self.wire = UnitWire(self.units)
        self.scatter = told(ScatterBuckets, [unit.size for unit in self.units], PartWire(),
                            shown="ScatterBuckets(sizes, wire)")
        self.optimizer = torch.optim.AdamW([unit.shard for unit in self.units], lr=LR, foreach=False)

    def update(self) -> None:
        for i in range(self.N):
            loss_of(self._forward, self.rank, i, self.N).backward()
            self._backward()
            told(self.scatter.end_of_backward, shown="end_of_backward()")
        means = told(self.scatter.finish, shown="finish()")
        for u, (unit, mean) in enumerate(zip(self.units, means, strict=True)):
            if mean.shape != unit.shard.shape:
                raise Fault(f"rank {self.rank}: finish() gave {mean.numel()} elements for unit {u}; this rank's part "
                            f"of it has {unit.shard.numel()}")
            unit.shard.grad = mean
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> torch.Tensor:
        parts = []
        for unit in self.units:
            unit.gather(dist.group.WORLD).wait(LIMIT)
            parts.append(unit.flat[:unit.size].clone())
            unit.free()
        return torch.cat(parts)

    def need_no_time(self) -> None:
        for layer in self.layers:
            layer.forward_ns = layer.backward_ns = 0

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output of the last layer, cut off from the graphs of the layers."""
        self._inputs: list[torch.Tensor] = [x.detach().requires_grad_()]
        self._outputs: list[torch.Tensor] = []

        def compute(u: int) -> None:
            self.wire.needed(u)
            if u != len(self._outputs):
                raise Refused(f"computed unit {u} of the forward pass when unit {len(self._outputs)} was to come")
            self._outputs.append(self.layers[u](self._inputs[u]))
            self._inputs.append(self._outputs[u].detach().requires_grad_())

        self._pass(list(range(len(self.layers))), compute, "forward")
        return self._inputs[-1]

    def _backward(self) -> None:
        left = list(range(len(self.layers)))

        def compute(u: int) -> None:
            self.wire.needed(u)
            if not left or u != left[-1]:
                raise Refused(f"computed unit {u} of the backward pass when unit {left[-1] if left else 'none'} was to "
                              "come")
            self._outputs[left.pop()].backward(self._inputs[u + 1].grad)
            params = self.units[u].params
            gradient = torch.cat([p.grad.flatten() for p in params])
            for p in params:
                p.grad = None
            with record.tag(u):
                told(self.scatter.bucket_full, u, gradient, shown=f"bucket_full({u}, gradient)")

        self._pass(left[::-1], compute, "backward")
        if left:
            raise Fault(f"rank {self.rank}: run_pass left out unit {left[-1]} of the backward pass")

    def _pass(self, order: list[int], compute: Callable[[int], None], what: str) -> None:
        told(self._run_pass, order, self.wire, compute, self.ahead, shown=f"run_pass in the {what} pass")
        if kept := [u for u, unit in enumerate(self.units) if unit.whole]:
            raise Fault(f"rank {self.rank}: run_pass ended the {what} pass with unit {kept[0]} still gathered; free "
                        "each unit after its last use")
        if len(self._outputs) < len(self.layers):
            raise Fault(f"rank {self.rank}: run_pass left out unit {len(self._outputs)} of the forward pass")
