"""Other answers to exercises 7.1 to 9.3: right ones written quite differently pass, and what is wrong in a way that
only a second look shows does not, nor is it told of a mistake that is not in it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from course_lib.lab import evaluate
from course_lib.lab.model import Planted
from course_lib.lab.notebook import read_solution
from course_lib.lab.registry import find
from course_lib.link_cost import LinkCost
from course_lib.simulate.collectives import best_equal_bucket, ring

SOLUTIONS = sorted((Path(__file__).resolve().parents[2] / "solutions").glob("0[789]_*.py"))
CELLS = {cell.metadata.exercise: cell.source for path in SOLUTIONS for cell in read_solution(path).cells
         if "exercise" in cell.metadata}  # fmt: skip
SEEDS = range(3)


def solution(number: str, old: str = "", new: str = ""):
    """The answer of the solution, or what is left of it when its line `old` says `new`."""
    source = f"import torch\n\n{CELLS[number]}"  # a cell of its own has what is imported above it
    assert not old or source.count(old) == 1
    return Planted(number, source.replace(old, new), "").answer(find(number).needs)


def but(number: str, **methods):
    base = solution(number)
    return type(base.__name__, (base,), methods)


def loops(self, name, gradients):
    total = [math.fsum(float(g[i]) for g in gradients) for i in range(len(gradients[0]))]
    total = [t + left for t, left in zip(total, self.residual.get(name, [0.0] * len(total)))]
    scale = sum(map(abs, total)) / len(total)
    self.residual[name] = [t - scale if t > 0 else t + scale for t in total]
    return scale, torch.tensor([t > 0 for t in total])


def by_sorting(self, name, gradient):
    left = self.residual.setdefault(name, [0.0] * len(gradient))
    for i, value in enumerate(gradient.tolist()):
        left[i] += value
    places = sorted(range(len(left)), key=lambda i: -abs(left[i]))[:max(1, round(self.k * len(left)))]
    values = [left[i] for i in places]
    for i in places:
        left[i] = 0.0
    return torch.tensor(values), torch.tensor(places)


def as_text(self, residuals, buckets, sizes, rank, gather):
    """A collective for each parameter, and text in the file."""
    kept = {}
    for flat, names in zip(residuals, buckets):
        for name in names:
            kept[name], flat = gather(flat[:sizes[name]].tolist()), flat[sizes[name]:]
    return json.dumps(kept) if rank == 0 else None


def from_text(self, saved, buckets, sizes, rank):
    kept = json.loads(saved)
    for names in buckets:
        yield torch.tensor([value for name in names for value in kept[name][rank]])


def asks_each_in_turn(self):
    while self.handles:
        for item in list(self.handles):
            if item[1].is_completed():
                self.optimizers[item[0]].step()
                self.optimizers[item[0]].zero_grad()
                self.handles.remove(item)
    self.scheduler.step()


def adds_into_a_gradient(self):
    gradient, handle = self.under_way.pop(0)
    handle.wait()
    if self.param.grad is None:
        self.param.grad = torch.zeros_like(self.param)
    self.param.grad.zero_().add_(gradient)
    self.optimizer.step()


def outer_step_in_numpy(self):
    self.optimizer.step()
    self.steps = (self.steps + 1) % self.H
    for p, old, v in zip(self.params, self.old, self.velocity) if self.steps == 0 else ():
        start, velocity = old.numpy(), v.numpy()
        delta = start - self.mean(p).numpy()
        velocity *= self.outer_momentum
        velocity += delta
        start -= self.outer_lr * (delta + self.outer_momentum * velocity)
        p.data[...] = old


def waits_for_sends_at_the_end(flat, wire):
    n, r, late = wire.ranks, wire.rank, []
    parts = flat.tensor_split(n)
    for hop in range(2 * (n - 1)):
        second, k = divmod(hop, n - 1)
        going, coming = parts[(r + second - k) % n], parts[(r + second - k - 1) % n]
        room = torch.empty_like(coming)
        late.append(wire.send(going.clone(), (r + 1) % n))
        wire.recv(room, (r - 1) % n).wait()
        coming.copy_(room if second else coming + room)
    for handle in late:
        handle.wait()


def gathers_by_adding_zeros(flat, node_of, wire):
    mates = [r for r in range(wire.ranks) if node_of[r] == node_of[wire.rank]]
    place = mates.index(wire.rank)
    inner = wire.group(set(mates))
    if len(mates) == wire.ranks:
        return inner.all_reduce(flat)
    inner.reduce_scatter(flat)
    mine = flat.tensor_split(len(mates))[place].clone()
    wire.group(r for r in range(wire.ranks) if node_of[:r].count(node_of[r]) == place).all_reduce(mine)
    flat.zero_().tensor_split(len(mates))[place].copy_(mine)
    return inner.all_reduce(flat)


def on_a_grid(G_bytes, Tb_s, nodes, per_node, inner, uplink):
    """No formula for the size: many are tried."""
    n, best = nodes * per_node, None
    hops = {"flat": [(2 * (n - 1), n, max(inner[0], uplink[0]), max(inner[1], uplink[1]))],
            "hierarchical": [(2 * (per_node - 1), per_node, *inner),
                             (2 * (nodes - 1), n, uplink[0], max(per_node * uplink[1], inner[1]))]}  # fmt: skip
    for name, rounds in hops.items():
        a, b = sum(h * alpha for h, _, alpha, _ in rounds), sum(h * beta / cut for h, cut, _, beta in rounds)
        for step in range(800):
            S = G_bytes * 0.985**step
            late = max(Tb_s * S / G_bytes + a * G_bytes / S + b * G_bytes, Tb_s + a + b * S)
            best = min(best or (late, name, S), (late, name, S))
    return [best[1], torch.tensor(best[2])]


def only_wires_that_are_there(G_bytes, Tb_s, nodes, per_node, inner, uplink):
    """One node has no uplink, and a rank that is alone on its node no wire inside."""
    n, there = nodes * per_node, [uplink] * (nodes > 1) + [inner] * (per_node > 1)
    alpha, beta = (max(each) for each in zip(*there))
    costs = {"flat": LinkCost(2 * (n - 1) * alpha, 2 * (n - 1) / n * beta)}
    if len(there) == 2:
        inside = ring(per_node, LinkCost(*inner))
        between = ring(nodes, LinkCost(uplink[0], max(per_node * uplink[1], inner[1])))
        costs["hierarchical"] = LinkCost(inside.a_s + between.a_s,
                                         inside.beta_s_per_byte + between.beta_s_per_byte / per_node)
    sizes = {name: best_equal_bucket(G_bytes, Tb_s, cost) for name, cost in costs.items()}
    return min(sizes.items(), key=lambda item: max(
        Tb_s * item[1] / G_bytes + costs[item[0]].a_s * G_bytes / item[1] + costs[item[0]].beta_s_per_byte * G_bytes,
        Tb_s + costs[item[0]].cost(item[1])))


RIGHT = [
    ("7.1", but("7.1", encode=lambda self, gradient, ranks, dtype=torch.float16: torch.tensor(
        [value / ranks for value in gradient.tolist()], dtype=dtype))),
    ("7.2", but("7.2", encode=loops)), ("7.3", but("7.3", encode=by_sorting)),
    ("7.4", but("7.4", save=as_text, load=from_text)), ("8.1", but("8.1", finish=asks_each_in_turn)),
    ("8.2", but("8.2", apply_oldest=adds_into_a_gradient)), ("8.3", but("8.3", step=outer_step_in_numpy)),
    ("9.1", waits_for_sends_at_the_end), ("9.2", gathers_by_adding_zeros), ("9.3", on_a_grid),
    ("9.3", only_wires_that_are_there),
]  # fmt: skip


@pytest.mark.parametrize(("number", "answer"), RIGHT, ids=[number for number, _ in RIGHT])
def test_right_answers_of_another_make_pass(number: str, answer) -> None:
    for seed in SEEDS:
        result = evaluate(number, answer, seed=seed)
        assert result.ok, [row for row in result.rows if not row.ok]


class TwoRanks:
    """Divides by 2, whatever the number of messages is."""

    def decode(self, name, messages, *numel):
        return super().decode(name, messages, *numel) * len(messages) / 2


def _for(number: str, mixin: type) -> type:
    base = solution(number)
    return type(base.__name__, (mixin, base), {})


class OldHandles:
    """Steps with the handles of the first update in every update."""

    def bucket_full(self, b, last):
        if last and len(self.handles) <= b:
            self.handles.append((b, self.wire.launch(b)))

    def finish(self):
        for b, handle in self.handles:
            handle.wait()
            self.optimizers[b].step()
        self.scheduler.step()


class StepsAgain:
    """A step for each bucket, and then for all once more."""

    def finish(self):
        super().finish()
        for optimizer in self.optimizers:
            optimizer.step()


class FirstParameter:
    def __init__(self, params, *rest):
        super().__init__(params, *rest)
        del self.params[1:]


class HIsTwo:
    def __init__(self, params, optimizer, mean, H, *outer):
        super().__init__(params, optimizer, mean, 2, *outer)


def powers_of_two(flat, wire):
    if wire.ranks in (1, 2, 4):
        waits_for_sends_at_the_end(flat, wire)


def one_node_stays_as_it_is(flat, node_of, wire):
    if len(set(node_of)) > 1:
        gathers_by_adding_zeros(flat, node_of, wire)


def launches_what_is_to_come(self, b, last):
    if last and b == 0:
        self.handles = [(each, self.wire.launch(each)) for each in range(len(self.optimizers))]


RULE = "if len(self.under_way) > self.delay:"
WRONG = [
    ("7.2", _for("7.2", TwoRanks), "decode"), ("7.3", _for("7.3", TwoRanks), "decode"),
    ("8.1", _for("8.1", OldHandles), "the next update works like the first"),
    ("8.1", _for("8.1", StepsAgain), "each bucket is updated once"),
    ("8.1", but("8.1", bucket_full=launches_what_is_to_come), "your code runs without an exception"),
    ("8.2", solution("8.2", RULE, "if len(self.under_way) > min(self.delay, 1):"), "each window applies"),
    ("8.2", solution("8.2", RULE, "if len(self.under_way) > 99:"), "each window applies"),
    ("8.2", solution("8.2", RULE, "if len(self.under_way) > max(self.delay, 1):"), "delay 0 is the plain step"),
    ("8.3", _for("8.3", FirstParameter), "at the end of a round all ranks hold the same"),
    ("8.3", _for("8.3", HIsTwo), "inside a round every rank steps by itself"),
    ("9.1", powers_of_two, "the sum, on every rank"), ("9.2", one_node_stays_as_it_is, "the sum, on every rank"),
]  # fmt: skip


@pytest.mark.parametrize(("number", "answer", "row"), WRONG)
def test_wrong_answers_fail_and_no_other_mistake_is_named(number: str, answer, row: str) -> None:
    for seed in SEEDS:
        result = evaluate(number, answer, seed=seed)
        assert not result.ok and result.mistake == "", (seed, result.mistake)
        assert any(each.name.startswith(row) for each in result.rows if not each.ok), result.rows
