"""What the learner wrote in 9.1 and 9.2 on real ranks and real wires, beside gloo's and the library's all-reduces.

Messages are told apart by whether they cross from node to node: their spans carry INSIDE or BETWEEN as a bucket number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from course_lib.launch import Fabric
from course_lib.timeline import Timeline
from course_lib.tune.sweep import Measured

if TYPE_CHECKING:
    from course_lib.simulate.collectives import Nodes

MB = 2**20
INSIDE, BETWEEN = 0, 1


@dataclass(frozen=True)
class Reduced(Measured):
    """An all-reduce. `from_reference` is the largest difference of an element from the sum, made in one process, as a
    fraction of the largest; `sent_between` are the bytes that the ranks of a node sent to other nodes in one."""

    from_reference: float
    sent_between: float


@dataclass(frozen=True)
class OnWires:
    """The wires as they were measured, and every all-reduce by name: `"your ring"`, `"your two levels"`, `"gloo"`,
    `"doubling"`."""

    nodes: Nodes
    reduced: dict[str, Reduced]


def reduce_runs(ring: Callable | None = None, two_levels: Callable | None = None, *, mb: float = 1.0, ranks: int = 4,
                fabric: str | Fabric = "auto", repeats: int = 5, timeout_s: float = 120.0) -> OnWires:
    """Time all-reduces of `mb` MB in alternation on the same ranks, on a fabric of two nodes or more: what was written
    in 9.1 and 9.2 where it is given, gloo's own, and recursive doubling.

    Raises `OwnRunFailed` with one sentence for whatever a function does wrong on a rank, a hang included.
    """
    from course_lib.lab.workbench.buckets import _run

    rows = _run(_on_rank, ring, two_levels, round(mb * MB), repeats, ranks=ranks, fabric=fabric, timeout_s=timeout_s)
    nodes, worst, seconds, _, _ = rows[0]
    per_node = nodes.ranks
    lines = {name: Timeline.merge(row[3][name] for row in rows) for name in seconds}
    sent = {name: sum(row[4][name] for row in rows[:per_node]) for name in seconds}
    return OnWires(nodes, {name: Reduced(name, tuple(seconds[name]), lines[name], worst[name], sent[name])
                           for name in seconds})  # fmt: skip


def _on_rank(ring, two_levels, nbytes, repeats):
    import torch
    import torch.distributed as dist

    from course_lib.collectives import all_reduce_doubling, node_groups
    from course_lib.collectives.measure import measure_nodes
    from course_lib.launch import context
    from course_lib.tune.alternate import Step, alternate

    spec, rank, ranks = context().spec, dist.get_rank(), dist.get_world_size()
    inner, inter = node_groups()
    nodes = measure_nodes(inner, inter, shared=spec.kind == "shaped", repeats=3)
    wire = RankWire(spec.node_of, inner, inter)
    flat = torch.empty(nbytes // 4)
    given = [torch.arange(flat.numel()) % (7 + r) + 0.25 * r for r in range(ranks)]
    ways = {}
    if ring is not None:
        ways["your ring"] = lambda: _call(ring, flat, wire, shown="ring_all_reduce(flat, wire)")
    if two_levels is not None:
        ways["your two levels"] = lambda: _call(two_levels, flat, list(spec.node_of), wire,
                                                shown="two_level_all_reduce(flat, node_of, wire)")
    ways |= {"gloo": lambda: dist.all_reduce(flat), "doubling": lambda: all_reduce_doubling(flat)}
    total, worst, sent = sum(given), {}, {}
    for name, way in ways.items():
        flat.copy_(given[rank])
        wire.sent_between = 0
        way()
        off = torch.tensor([float((flat - total).abs().max() / total.abs().max())])
        dist.all_reduce(off, op=dist.ReduceOp.MAX)
        worst[name], sent[name] = float(off), float(wire.sent_between)
    steps = {name: Step(way, flat.zero_) for name, way in ways.items()}
    return nodes, worst, *alternate(steps, repeats, 1, f"measured (real wires), {spec.provenance}"), sent


class RankWire:
    """What the learner's functions see of the wire: `rank`, `ranks`, `send`, `recv` and `group`."""

    limit_s = 30.0

    def __init__(self, node_of, inner, inter) -> None:
        import torch.distributed as dist

        self.rank, self.ranks, self._node_of = dist.get_rank(), dist.get_world_size(), node_of
        self._groups = {tuple(dist.get_process_group_ranks(group)): group for group in (inner, inter)}
        self.sent_between = 0.0
        """Bytes this rank sent to other nodes."""

    def send(self, tensor, to) -> Message:
        """Start sending and return at once."""
        import torch.distributed as dist

        return self._message(dist.isend, tensor, to, sends=True)

    def recv(self, tensor, source) -> Message:
        """Start receiving and return at once."""
        import torch.distributed as dist

        return self._message(dist.irecv, tensor, source, sends=False)

    def group(self, members) -> RankGroup:
        """The group of the ranks of this node, or of those with this rank's place in every node."""
        from course_lib.lab.workbench.rank import Refused

        key = tuple(sorted(set(members)))
        if key not in self._groups:
            raise Refused(f"asked for the group {list(key)}; its groups are "
                          f"{' and '.join(str(list(each)) for each in self._groups)}")
        return RankGroup(self, self._groups[key], len({self._node_of[r] for r in key}) > 1)

    def _message(self, start, tensor, other, sends) -> Message:
        from course_lib import record

        crosses = self._node_of[other] != self._node_of[self.rank]
        self.sent_between += sends * crosses * tensor.numel() * tensor.element_size()
        with record.tag(BETWEEN if crosses else INSIDE):
            return Message(start(tensor, other))


class Message:
    """The handle of a message on its way."""

    def __init__(self, work) -> None:
        self._work = work

    def wait(self, timeout: object = None) -> bool:
        self._work.wait(timedelta(seconds=RankWire.limit_s))
        return True


class RankGroup:
    """A group with the three collectives of exercise 9.2, made of rings."""

    def __init__(self, wire, group, crosses) -> None:
        import torch.distributed as dist

        self._wire, self._group, self._crosses = wire, group, crosses
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def reduce_scatter(self, flat) -> None:
        from course_lib.collectives import reduce_scatter_ring

        self._collective(reduce_scatter_ring, flat, 1)

    def all_reduce(self, flat) -> None:
        from course_lib.collectives import all_reduce_ring

        self._collective(all_reduce_ring, flat, 2)

    def all_gather(self, flat) -> None:
        from course_lib.collectives import all_gather_ring

        self._collective(all_gather_ring, flat, 1)

    def _collective(self, ring, flat, share) -> None:
        from course_lib import record

        with record.tag(BETWEEN if self._crosses else INSIDE):
            ring(flat, self._group, chunks=1)
        part = share * (self.ranks - 1) / self.ranks
        self._wire.sent_between += self._crosses * part * flat.numel() * flat.element_size()


def _call(function, *arguments, shown):
    import torch.distributed as dist

    from course_lib.lab.guard import Broke, call
    from course_lib.lab.workbench.rank import Fault

    try:
        return call(function, *arguments, shown=shown)
    except Broke as broke:
        raise Fault(f"rank {dist.get_rank()}: {broke}") from broke


@dataclass(frozen=True)
class Trained(Measured):
    """A DDP update. `from_stock` is the largest difference of a gradient element from stock DDP's, as a fraction of the
    largest."""

    from_stock: float


def train_runs(model: Callable, bucket_mb: float, *, ranks: int = 4, fabric: str | Fabric = "auto", repeats: int = 5,
               timeout_s: float = 120.0) -> dict[str, Trained]:
    """Stock DDP, with the all-reduce of the backend and with those of `course_lib.collectives` as a comm hook:
    `"DDP"`, `"DDP, flat ring"`, `"DDP, two levels"`, in alternation on the same ranks."""
    from course_lib.launch import run

    rows = run(_train_on_rank, model, bucket_mb, repeats, ranks=ranks, fabric=fabric, timeout_s=timeout_s)
    off, seconds, _ = rows[0]
    return {name: Trained(name, tuple(seconds[name]), Timeline.merge(row[2][name] for row in rows), off[name])
            for name in seconds}  # fmt: skip


def _train_on_rank(model, bucket_mb, repeats):
    from functools import partial

    import torch.distributed as dist

    from course_lib.collectives import all_reduce_hierarchical, all_reduce_ring, hook, node_groups
    from course_lib.lab.workbench import gradients
    from course_lib.launch import context
    from course_lib.train import emulated, wrap
    from course_lib.tune.alternate import Step, alternate

    inner, inter = node_groups()
    ways = {"DDP": None, "DDP, flat ring": all_reduce_ring,
            "DDP, two levels": partial(all_reduce_hierarchical, inner=inner, inter=inter)}
    steps, found = {}, {}
    for name, way in ways.items():
        hooked = {} if way is None else {"comm_hook": hook, "hook_state": way}
        ddp = wrap("ddp", model(), bucket_mb=bucket_mb, first_bucket_mb=None, **hooked)

        def update(ddp=ddp):
            gradients.loss_of(ddp, dist.get_rank(), 0, 1).backward()

        steps[name] = Step(update, ddp.zero_grad)
        with gradients.instant(ddp.module):
            update()
        found[name] = gradients.flat_gradient(ddp.module)
    off = {name: gradients.difference(one, found["DDP"]) for name, one in found.items()}
    return off, *alternate(steps, repeats, 1, f"{emulated.PROVENANCE}, {context().spec.provenance}")
