"""The backward of a stage in two halves: first what the stage before waits for, later the weights.

The nodes of the autograd graph through which the output depends on the stage's input are walked once for I. Where
a weight joins them, the gradient that arrives is kept, and W starts from there: nothing of I is computed again.
W goes through the weights' own accumulation, so that their hooks fire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from course_lib.schedule.action import ScheduleError


@dataclass
class _Joint:
    """Nodes at which the same weights join, the weights, and the gradients that arrived at the nodes."""

    nodes: list[Node]
    params: list[torch.Tensor]
    arrived: dict[Node, tuple[torch.Tensor | None, ...]]

    def run(self) -> None:
        edges = [(GradientEdge(node, i), grad) for node in self.nodes
                 for i, grad in enumerate(self.arrived.get(node, ())) if grad is not None]
        if not edges:
            return
        # A weight used twice: from its first node one gets to its second, where only what arrived in I may count.
        handles = [node.register_prehook(lambda _, kept=self.arrived[node]: kept)
                   for node in self.nodes if len(self.nodes) > 1 and node in self.arrived]
        try:
            torch.autograd.backward([edge for edge, _ in edges], [grad for _, grad in edges], inputs=self.params,
                                    retain_graph=True)
        finally:
            for handle in handles:
                handle.remove()


class WeightHalf:
    """What is left to do for the weights. `run` adds to their `.grad`, once."""

    def __init__(self, joints: Sequence[_Joint]) -> None:
        self._joints = list(joints)

    def run(self) -> None:
        for joint in self._joints:
            joint.run()
        self._joints.clear()


def backward_input(output: torch.Tensor, grad: torch.Tensor | None, x: torch.Tensor,
                   params: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, WeightHalf]:
    """The gradient of `x`, a leaf, and the half that is left for `params`.

    `grad` is the gradient of `output`, or None for a scalar. Where the output does not depend on `x`, or `x` needs no
    gradient (tokens), the first is None and the whole backward is left for the second. A custom autograd function
    that does not look at which gradient is wanted computes both in each half. Raises `ScheduleError` for a checkpoint
    with use_reentrant=True, whose graph does not show its weights.
    """
    params = [p for p in params if p.requires_grad]
    grad = torch.ones_like(output) if grad is None else grad
    if not output.requires_grad:
        return None, WeightHalf([])
    root = get_gradient_edge(output)
    before = _before(root.node)
    if any(node.name() == "CheckpointFunctionBackward" for node in before):
        raise ScheduleError("a checkpoint with use_reentrant=True cannot go backward in two halves; use "
                            "use_reentrant=False, or a schedule whose backward is whole")
    path = _leading_to(before, get_gradient_edge(x).node) if x.requires_grad else set()
    joints = _joints(path, params) if root.node in path else [
        _Joint([root.node], params, {root.node: (*[None] * root.output_nr, grad)})]
    if root.node not in path:
        return None, WeightHalf(joints)

    def keep(joint: _Joint, node: Node):
        return node.register_prehook(lambda grads: joint.arrived.__setitem__(node, grads))

    handles = [keep(joint, node) for joint in joints for node in joint.nodes]
    try:
        (of_x,) = torch.autograd.grad([output], [x], [grad], retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    return of_x, WeightHalf(joints)


def _next(node: Node) -> list[Node]:
    return [after for after, _ in node.next_functions if after is not None]


def _before(root: Node) -> dict[Node, list[Node]]:
    """Every node that can be reached from `root`, with those that lead to it at once."""
    before: dict[Node, list[Node]] = {root: []}
    todo = [root]
    while todo:
        node = todo.pop()
        for after in _next(node):
            if after not in before:
                before[after] = []
                todo.append(after)
            before[after].append(node)
    return before


def _leading_to(before: dict[Node, list[Node]], target: Node) -> set[Node]:
    """The nodes on any way from the root of `before` to `target`, both included; empty where there is none."""
    found, todo = set(), [target] if target in before else []
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += before[node]
    return found


def _joints(path: set[Node], params: Sequence[torch.Tensor]) -> list[_Joint]:
    """Nodes of the path at which weights join, those that share a weight together."""
    owner = {get_gradient_edge(p).node: p for p in params}
    joints: list[_Joint] = []
    for node in path:
        reached, todo = set(), [after for after in _next(node) if after not in path]
        while todo:
            side = todo.pop()
            if side not in reached:
                reached.add(side)
                todo += _next(side)
        own = {id(owner[n]): owner[n] for n in reached if n in owner}
        if not own:
            continue
        shared = [j for j in joints if any(id(p) in own for p in j.params)]
        for joint in shared:
            joints.remove(joint)
            own |= {id(p): p for p in joint.params}
        joints.append(_Joint([node, *(n for j in shared for n in j.nodes)], list(own.values()), {}))
    return joints
