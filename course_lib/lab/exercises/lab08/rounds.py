"""Exercise 8.3: local steps, and an outer step at the end of each round.

The learner writes one method; the cell of the exercise gives the rest:

    class Rounds:
        def __init__(self, params, optimizer, mean, H, outer_lr, outer_momentum):
            self.params = list(params)           # of this rank
            self.optimizer = optimizer           # of this rank; its momentum stays this rank's own
            self.mean = mean                     # mean(tensor) -> a new tensor, the mean over ranks; a collective
            self.H, self.outer_lr, self.outer_momentum = H, outer_lr, outer_momentum
            self.old = [p.detach().clone() for p in self.params]
            self.velocity = [torch.zeros_like(p) for p in self.old]
            self.steps = 0

        def step(self): ...                      # in place of optimizer.step()

After each H local steps, with Δ = old − mean(θ): velocity ← outer_momentum·velocity + Δ, and θ and old become
old − outer_lr·(Δ + outer_momentum·velocity), on every rank. That is DiLoCo's algorithm 1 (Douillard et al.,
arXiv:2311.08105) with PyTorch's Nesterov momentum; outer_lr 1 without momentum is Local SGD.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from course_lib.lab.exercises.lab08.played_ranks import Missing, play
from course_lib.lab.guard import Broke, call, on_its_side
from course_lib.lab.model import Row, Verdict, exercise

if TYPE_CHECKING:
    from torch import Tensor

HINTS = (
    "Every call makes a local step. Only each H-th ends a round. At its end every rank must hold the same parameters, "
    "and remember them: the next round starts there.",
    "Count the steps after the local one; return unless the count is a multiple of H. Then for each parameter: the "
    "outer gradient is where the round started minus where the ranks are now, on average. It points against the way "
    "they went, as a gradient does, because a step subtracts it.",
    "self.optimizer.step(); self.steps += 1; if self.steps % self.H: return. Under torch.no_grad(), for p, old, v in "
    "zip(self.params, self.old, self.velocity): delta = old - self.mean(p); v.mul_(self.outer_momentum).add_(delta); "
    "old.sub_(self.outer_lr * (delta + self.outer_momentum * v)); p.copy_(old).",
)

MISTAKES = {
    "hangs": "Not every rank called mean as often as the others. It is a collective: what a rank has computed may not "
    "decide whether it calls it.",
    "wrong_sign": "Your outer gradient points the way the ranks went. A step subtracts it, so it leads back, past the "
    "start. Where they started minus where they are.",
    "averages_state": "The optimizer's momentum is averaged over ranks. That is another method, at twice the bytes. "
    "Here each rank's state stays its own, as in DiLoCo and PyTorch's PostLocalSGDOptimizer.",
    "resets_state": "The optimizer's momentum is lost at the end of a round, so each round begins at a standstill. "
    "Averaging is for parameters; leave `optimizer.state` alone.",
    "start_kept": "The first round is right; in the second the outer gradient still begins where the *first* round "
    "did. Let `old` be what the round has ended with.",
    "same_memory": "The first round is right; after it `old` and the parameter lie in the same memory, so the local "
    "steps move `old` too, and each rank then measures from its own place. Copy values (`p.copy_(old)`), not tensors.",
    "ranks_left": "`old` is stepped, and the ranks go on from their own parameters. They were averaged nowhere. Copy "
    "the result into every parameter.",
    "every_step": "You average after every step, so H changes nothing and you send H times the bytes. Only each H-th "
    "step ends a round.",
    "one_early": "Your rounds end one step early: you count from 0, or before the local step. The first round ends "
    "after H steps.",
    "only_the_mean": "The parameters become the mean over ranks: that is Local SGD, right for outer_lr 1 and "
    "outer_momentum 0. With other values the outer step is missing.",
    "no_nesterov": "You step by the new velocity alone, which is Δ + outer_momentum·(old velocity). Nesterov's "
    "momentum looks ahead: update the velocity first, then step by Δ + outer_momentum·velocity.",
    "sends_too_much": "The parameters are right, but you call mean more often than once a parameter and round. Each "
    "call sends the tensor, used or not, and sending less is what rounds are for: call it when the round is over.",
    "no_local_step": "No local step is made: `step` stands for optimizer.step(), so call that first.",
}


LR, MOMENTUM = 0.1, 0.9
"""Of the local steps."""
SIZE = 5
"""Entries of all parameters of a rank."""


class Problem(NamedTuple):
    """The gradient of rank r in step t is a[r]·θ + c[t][r]."""

    ranks: int
    steps: int
    H: int
    outer: tuple[float, float]
    start: Tensor
    a: list[Tensor]
    c: list[list[Tensor]]

    def __str__(self) -> str:
        return f"{self.ranks} ranks, H {self.H}, outer_lr {self.outer[0]:g}, outer_momentum {self.outer[1]:g}"


class Played(NamedTuple):
    """Parameters of each rank after each step, as seen and as they should be: `seen[rank][t]`. `sent[t]`: how many
    entries a rank gave to mean in step t, the most of any."""

    problem: Problem
    seen: list[list[Tensor]]
    sent: list[int]
    want: list[list[Tensor]]

    def same(self, other: list[list[Tensor]], count: int | None = None) -> bool:
        import torch
        return all(torch.allclose(torch.stack(mine[:count]), torch.stack(theirs[:count]), rtol=1e-4, atol=1e-5)
                   for mine, theirs in zip(self.seen, other))

    def right(self, count: int | None = None) -> bool:
        return self.same(self.want, count)

    def agree(self) -> bool:
        """Do all ranks hold the same at the end of each round?"""
        import torch
        ends = range(self.problem.H - 1, self.problem.steps, self.problem.H)
        return all(torch.allclose(mine[t], self.seen[0][t]) for mine in self.seen for t in ends)

    def cheap(self) -> bool:
        """Did a rank send its parameters once a round, and nothing else?"""
        return all(sent <= (0 if (t + 1) % self.problem.H else SIZE) for t, sent in enumerate(self.sent))

    def __str__(self) -> str:
        wrong = next((t + 1 for t in range(self.problem.steps) if not self.right(t + 1)), 0)
        said = f"{self.problem}: " + (f"parameters are wrong after step {wrong}" if wrong else "right")
        said += "" if self.cheap() else f"; of {SIZE} entries a rank sent {', '.join(map(str, self.sent))} by step"
        return said + ("" if self.agree() else "; the ranks differ at the end of a round")


@exercise("8.3", title="local steps and an outer step", minutes=8, needs="Rounds", hints=HINTS, mistakes=MISTAKES,
          kind="class")  # fmt: skip
def average_in_rounds(answer: type, draw: random.Random) -> Verdict:
    """Rows over a handful of trainings of two rounds, every rank a thread."""
    if not callable(getattr(answer, "step", None)):
        raise Broke("the class has no method `step`")
    outers = [(1.0, 0.0), (1.0, 0.0), (0.7, 0.9), (0.5, 0.0), (draw.uniform(0.3, 0.9), 0.8)]
    shapes = draw.sample([(2, 2), (2, 3), (3, 2), (3, 3), (2, 3)], len(outers))
    try:
        played = [_played(answer, _problem(draw, outer, *shape)) for outer, shape in zip(outers, shapes)]
    except Missing as missing:
        row = Row("every rank calls mean equally often", False, "the same calls on all ranks", str(missing))
        return Verdict((row,), "hangs")
    plain, stepped = played[:2], played[2:]
    rows = (
        _row("inside a round every rank steps by itself", "its own optimizer.step()", played,
             lambda p: p.right(p.problem.H - 1)),
        _row("at the end of a round all ranks hold the same", "equal parameters", played, Played.agree),
        _row("outer_lr 1 without momentum is the mean", "Local SGD", plain, Played.right),
        _row("the first outer step", "old − outer_lr·(Δ + outer_momentum·velocity)", stepped,
             lambda p: p.right(p.problem.H)),
        _row("and the rounds after it", "the same again, momentum carried on", stepped, Played.right),
        _row("what is sent", "each parameter once, at the end of a round", played, Played.cheap),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(played))


def wanted(problem: Problem, how: str = "") -> list[list[Tensor]]:
    """Parameters of each rank after each step, all ranks at once; `how` makes a known mistake."""
    import torch

    theta = problem.start.repeat(problem.ranks, 1)
    a, moment, seen = torch.stack(problem.a), torch.zeros_like(theta), []
    old, velocity = theta, torch.zeros_like(theta)
    (lr, momentum), H = problem.outer, 1 if how == "every_step" else problem.H
    for t in range(problem.steps):
        if how != "no_local_step":
            moment = MOMENTUM * moment + a * theta + torch.stack(problem.c[t])
            theta = theta - LR * moment
        if (t + 1 + (how == "one_early")) % H == 0:
            if how == "same_memory" and t >= H:
                old = theta
            mean = theta.mean(0).repeat(problem.ranks, 1)
            delta = mean - old if how == "wrong_sign" else old - mean
            velocity = momentum * velocity + delta
            new = old - lr * (velocity if how == "no_nesterov" else delta + momentum * velocity)
            if how == "only_the_mean":
                new = mean
            if how != "start_kept":
                old = new
            if how != "ranks_left":
                theta = new
            if how == "averages_state":
                moment = moment.mean(0).repeat(problem.ranks, 1)
            elif how == "resets_state":
                moment = torch.zeros_like(moment)
        seen.append(theta)
    return [[each[rank] for each in seen] for rank in range(problem.ranks)]


def _mistake(played: list[Played]) -> str:
    """The mistake whose parameters are seen, in all trainings."""
    if all(map(Played.right, played)):
        return "sends_too_much"
    return next((how for how in MISTAKES if how != "hangs" and all(p.same(wanted(p.problem, how)) for p in played)), "")


def _problem(draw: random.Random, outer: tuple[float, float], ranks: int, H: int, rounds: int = 2) -> Problem:
    import torch

    def some(low: float, high: float) -> Tensor:
        return torch.tensor([draw.uniform(low, high) for _ in range(SIZE)])

    return Problem(ranks, rounds * H + 1, H, outer, some(1, 2), [some(0.5, 1.5) for _ in range(ranks)],
                   [[some(-2, 2) for _ in range(ranks)] for _ in range(rounds * H + 1)])


def _optimizer(params: list[Tensor]) -> Any:
    import torch
    return torch.optim.SGD(params, lr=LR, momentum=MOMENTUM)


def _parts(values: list[float]) -> list[Tensor]:
    """Two parameters of different shapes, or their gradients."""
    import torch
    return [torch.tensor(values[:2]), torch.tensor(values[2:]).view(-1, 1)]


def _played(answer: type, problem: Problem) -> Played:
    """Raises `Missing` where the ranks missed each other in a mean."""
    import torch

    a, c = [each.tolist() for each in problem.a], [[each.tolist() for each in step] for step in problem.c]
    ranks = on_its_side(told, answer, problem.H, list(problem.outer), problem.start.tolist(), a, c)
    if isinstance(ranks, str):
        raise Missing(ranks)
    seen = [[torch.tensor(values) for values, _ in rank] for rank in ranks]
    sent = [max(numel for _, numel in step) for step in zip(*ranks)]
    return Played(problem, seen, sent, wanted(problem))


def told(answer: type, H: int, outer: list[float], start: list[float], a: list[list[float]],
         c: list[list[list[float]]]) -> list[list[list]] | str:  # fmt: skip
    """Of each rank and step the parameters after it and how many entries were sent, or how the ranks missed each other;
    on the side where the learner's class lives, a thread for each rank."""
    import torch

    def on(rank: int, meeting: Any) -> list[list]:
        params, seen, sent = [torch.nn.Parameter(part) for part in _parts(start)], [], [0] * len(c)

        def mean(tensor: Tensor) -> Tensor:
            found = meeting.mean(rank, len(seen), tensor)
            sent[len(seen)] += found.numel()
            return found

        mine = call(answer, params, _optimizer(params), mean, H, *outer,
                    shown="Rounds(params, optimizer, mean, H, outer_lr, outer_momentum)")  # fmt: skip
        for t, noise in enumerate(c):
            for param, slope, offset in zip(params, _parts(a[rank]), _parts(noise[rank])):
                param.grad = (slope * param + offset).detach()
            call(mine.step, shown=f"step() number {t + 1} on rank {rank}")
            seen.append([float(x) for param in params for x in param.detach().flatten()])
        return [list(each) for each in zip(seen, sent)]

    try:
        return list(play(on, len(a)))
    except Broke as broke:
        if isinstance(broke.__cause__, Missing):
            return str(broke)
        raise


def _row(name: str, expected: str, cases: list[Played], holds: Callable[[Played], bool]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: (c.problem.ranks, c.problem.H))
    return Row(name, not broken, expected, str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} runs")
