"""What 11.1 and 11.2 are judged by: an MLP in one process, its parts on every rank, and ranks that are played."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from course_lib.lab.exercises.lab09.replay import play
from course_lib.lab.exercises.lab11.meeting import Call, Meeting, PlayedRank
from course_lib.lab.guard import Broke, on_its_side
from course_lib.lab.model import Row
from course_lib.lab.workbench.crossing import one_pass

if TYPE_CHECKING:
    from torch import Tensor

CUT = {"up": 0, "up_bias": 0, "down": 1}
"""The parameters of which every rank has a part, with the dimension that is cut. The others are whole on every rank."""


@dataclass
class Case:
    """One forward and backward pass: the sizes, what is right, and what was found on each rank."""

    ranks: int
    x: Tensor
    upstream: Tensor
    full: dict[str, Tensor]
    y: Tensor
    grads: dict[str, Tensor]
    """Of the whole MLP in one process, `x` included."""
    outputs: dict[int, Any] = field(default_factory=dict)
    found: dict[int, dict[str, Tensor | None]] = field(default_factory=dict)
    waits: dict[int, str] = field(default_factory=dict)
    logs: dict[int, list[Call]] = field(default_factory=dict)
    broke: str = ""
    shards: bool = False
    """Whether a rank has its rows of x only."""

    def part(self, name: str, whole: Tensor, rank: int) -> Tensor:
        """What rank `rank` should have of a parameter, a gradient, `x` or `y`."""
        if name in CUT:
            return whole.chunk(self.ranks, dim=CUT[name])[rank]
        return whole.chunk(self.ranks, dim=-2)[rank] if self.shards and name in ("x", "y") else whole

    def ended(self) -> bool:
        return not self.waits and not self.broke

    def output_is(self, wanted: Tensor | Callable[[int], Tensor]) -> bool:
        """Whether every rank returned `wanted`, or its part of it."""
        return self.ended() and all(
            close(self.outputs[r], wanted(r) if callable(wanted) else self.part("y", wanted, r))
            for r in range(self.ranks))  # fmt: skip

    def gradient_is(self, name: str, factor: float = 1.0) -> bool:
        """Whether every rank has `factor` times the right gradient."""
        return self.ended() and all(close(self.found[r].get(name), factor * self.part(name, self.grads[name], r))
                                    for r in range(self.ranks))  # fmt: skip

    def adds_up(self, name: str) -> bool:
        """Whether the ranks found summands of the right gradient, and not the gradient itself."""
        parts = [self.found[r][name] for r in range(self.ranks)] if self.ended() else []
        return not self.right(name) and close(sum(part for part in parts if part is not None), self.grads[name])

    def right(self, *names: str) -> bool:
        return all(self.gradient_is(name) for name in names)

    def calls(self, *, op: str | None = None, when: str | None = None, rank: int = 0) -> list[Call]:
        return [c for c in self.logs.get(rank, []) if op in (None, c.op) and when in (None, c.when)]

    def sent(self) -> float:
        """Elements that a rank sent, the most of any."""
        return max((sum(c.sent for c in log) for log in self.logs.values()), default=0)

    def story(self, seen: str) -> str:
        said = f"{self.ranks} ranks, x of {tuple(self.x.shape)}"
        if self.broke or self.waits:
            return f"{said}: {self.broke or '; '.join(list(self.waits.values())[:2])}"
        ops = ", ".join(f"{c.op} {'by itself' if c.when == 'direct' else c.when}" for c in self.logs[0])
        return f"{said}: {seen}; collectives of rank 0: {ops or 'none'}"

    def seen(self, *names: str) -> str:
        """The first of the named results that is wrong on some rank, in numbers."""
        for r in range(self.ranks):
            for name in names:
                whole = self.y if name == "y" else self.grads[name]
                found = self.outputs.get(r) if name == "y" else self.found.get(r, {}).get(name)
                want = self.part(name, whole, r)
                if not close(found, want):
                    what = "the output" if name == "y" else f"the gradient of {name}"
                    return f"{what} on rank {r} begins {_numbers(found)}, not {_numbers(want)}"
        return "right"


def close(found: object, wanted: Tensor) -> bool:
    import torch

    return isinstance(found, torch.Tensor) and found.shape == wanted.shape and torch.allclose(
        found.double(), wanted, rtol=1e-6, atol=1e-8)


def drawn(draw: random.Random, ranks: int, dims: int, block: bool) -> Case:
    """A random MLP of float64 and a batch for it. With `block` it is normalised before and x is added after it, and
    every rank has its rows of x only."""
    import torch

    generator = torch.Generator().manual_seed(draw.randrange(2**31))

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    width, part = draw.sample(range(3, 8), 2)
    hidden = ranks * part
    full = {"norm_weight": 1 + 0.5 * numbers(width), "norm_bias": numbers(width)} if block else {}
    full |= {"up": numbers(hidden, width), "up_bias": numbers(hidden), "down": numbers(width, hidden),
             "down_bias": numbers(width)}
    shape = (*(draw.randint(2, 3) for _ in range(dims - 2)), ranks * draw.randint(2, 3), width)
    case = Case(ranks, numbers(*shape), numbers(*shape), full, None, {}, shards=block)
    leaves = {name: t.clone().requires_grad_() for name, t in {"x": case.x, **full}.items()}
    y = reference(**leaves)
    y.backward(case.upstream)
    case.y, case.grads = y.detach(), {name: leaf.grad for name, leaf in leaves.items()}
    return case


def reference(x, up, up_bias, down, down_bias, norm_weight=None, norm_bias=None, bias_times: int = 1):
    """The MLP in one process, or the block where it is given norm parameters."""
    import torch.nn.functional as F

    normed = x if norm_weight is None else F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias)
    y = F.linear(F.gelu(F.linear(normed, up, up_bias)), down) + bias_times * down_bias
    return y if norm_weight is None else x + y


def played(case: Case, answer: Any) -> Case:
    """Play all ranks through what the learner wrote. An exception is part of what was seen."""
    meeting = Meeting()

    def one(rank: int) -> None:
        here = PlayedRank(meeting, rank, case.ranks)
        given = tuple((name, case.part(name, whole, rank)) for name, whole in {"x": case.x, **case.full}.items())
        case.logs[rank] = here.log
        case.outputs[rank], case.found[rank] = on_its_side(
            one_pass, answer, given, case.part("y", case.upstream, rank), rank, case.ranks,
            lambda op, when, x: here.collective(op, when, x))

    try:
        case.waits = play(case.ranks, one, meeting.known).waits
    except Broke as error:
        case.broke = str(error)
    return case


def refused(cases: Iterable[Case], name: str) -> Row | None:
    """The row for an output that is none: no tensor, another shape, or one that no gradient reaches."""
    import torch

    for case in cases:
        want = tuple(case.part("y", case.y, 0).shape)
        for rank, y in sorted(case.outputs.items()):
            got = (None if isinstance(y, torch.Tensor) and tuple(y.shape) == want else
                   f"a tensor of {tuple(y.shape)}" if isinstance(y, torch.Tensor) else repr(y))  # fmt: skip
            if got is not None:
                return Row(f"{name} returns the output", False, f"a tensor of {want} on rank {rank} of {case.ranks}",
                           f"{name} gave {got}")
            if case.ended() and all(grad is None for grad in case.found[rank].values()):
                return Row(f"{name} returns the output", False, "a tensor that a gradient can flow through",
                           "its backward pass never began: no parameter is part of the result")
    return None


def row(name: str, expected: str, cases: list[Case], holds: Callable[[Case], bool],
        seen: Callable[[Case], str]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: (c.ranks, c.x.numel()))
    said = broken[0].story(seen(broken[0])) if broken else f"held in {len(cases)} of {len(cases)} passes"
    return Row(name, not broken, expected, said)


def _numbers(tensor: object) -> str:
    return "with nothing" if tensor is None else " ".join(f"{v:.3g}" for v in tensor.flatten()[:3].tolist())
