"""Exercise 9.3: which all-reduce, and which bucket, for these wires.

The learner writes `choose(G_bytes, Tb_s, nodes, per_node, inner, uplink)`:

- `inner` and `uplink` are (α, β) of one message: seconds, and seconds per byte. All ranks of a node share its uplink:
  when all `per_node` of them send at once, each has a `per_node`-th of its rate.
- A *flat* ring of all n ranks makes 2(n−1) hops of S/n bytes, each as slow as its slowest message in α and in β; the
  message that leaves a node has the uplink to itself.
- *hierarchical* makes 2(g−1) hops of S/g inside (g = `per_node`), and 2(m−1) hops of S/(g·m) between the m nodes, in
  which all ranks of a node send at once.
- Either way a bucket costs c(S) = a + b·S. `G_bytes` become ready evenly over `Tb_s`; equal buckets of S arrive at
  max(Tb·S/G + a·G/S + b·G, Tb + a + b·S).
- The result is ("flat" or "hierarchical", S), of all choices the one that arrives first, with S from 0 to G. With one
  node, or one rank a node, both are one ring, and either name is right.

An answer passes when it arrives within 1 % of the best. Wrong answers are recognised by computing them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from course_lib.lab.guard import call
from course_lib.lab.model import Row, Verdict, exercise
from course_lib.link_cost import LinkCost
from course_lib.simulate.collectives import Nodes, best_equal_bucket, flat_ring, hierarchical

MB = 2**20
NAMES = ("flat", "hierarchical")

HINTS = (
    "Two questions, one after the other. What does a bucket cost in each algorithm: its a, and its b? Then the bucket "
    "of lab 05 for each, and the arrival that it gives. The earlier one wins.",
    "flat: n = nodes·per_node, α and β the larger of the two wires', a = 2(n−1)·α, b = 2(n−1)/n·β. hierarchical: a = "
    "2(g−1)·α_inner + 2(m−1)·α_uplink, b = 2(g−1)/g·β_inner + 2(m−1)/(m·g)·β, where β between the nodes is g·β_uplink, "
    "or β_inner if that is larger.",
    "best_equal_bucket(G_bytes, Tb_s, LinkCost(a, b)) of course_lib.simulate.collectives gives S. Arrival: "
    "max(Tb_s * S / G_bytes + a * G_bytes / S + b * G_bytes, Tb_s + a + b * S). Build both candidates as (arrival, "
    "name, S), take min(candidates), return its name and S.",
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end?",
    "alpha_once": "Your a is that of one message. A ring all-reduce makes 2(n−1) hops, and each pays α: with 64 ranks "
    "that is 126 α. Your buckets are too small.",
    "upside_down": "Your buckets shrink when the latency grows. That is the popular advice, and it is backwards: each "
    "bucket pays a, so high latency wants fewer, larger ones.",
    "free_uplink": "You give every rank the whole uplink. All ranks of a node send between the nodes at the same time, "
    "and each has a part of its rate.",
    "whole_between": "You send the whole bucket between the nodes. After the reduce-scatter inside, each rank has a "
    "g-th of it to send.",
    "beyond_the_inside": "Where the uplink is very good, your bytes between the nodes are faster than a rank can hand "
    "them over. A byte takes g·β of the uplink there, or the β of the wires inside, whichever is more.",
    "average_ring": "Your flat ring is faster than its slowest wire. All ranks move in step: a hop ends when its "
    "slowest message has arrived.",
    "always_flat": "You always take the flat ring. On a slow or late uplink it pays that uplink in each of its 2(n−1) "
    "hops.",
    "always_hierarchical": "You always take two levels. They always have the lower latency. But where the uplink is as "
    "good as the wires inside, a byte costs more: all ranks of a node queue for it, and the one message of a flat ring "
    "that leaves a node shares it with no other. Compare arrivals, not latencies.",
    "one_node": "With one node no message leaves it: there are no hops between, and the slowest message of the flat "
    "ring is one inside. You let it pay the uplink.",
    "one_rank": "With one rank on each node no message stays inside: every hop goes over the uplink. You let the ring "
    "pay the wires inside.",
    "root_everywhere": "On a fast wire your bucket is too large. Once the wire keeps up with backward, only the last "
    "bucket is exposed: the smallest size that keeps up wins. `best_equal_bucket` knows both cases.",
}


class Case(NamedTuple):
    """One cluster: the arguments, and what came back."""

    G: float
    Tb: float
    nodes: int
    per_node: int
    inner: tuple[float, float]
    uplink: tuple[float, float]
    name: Any = None
    S: float = math.nan

    def costs(self) -> dict[str, LinkCost]:
        cluster = Nodes(self.nodes, self.per_node, LinkCost(*self.inner), LinkCost(*self.uplink))
        return {"flat": flat_ring(cluster), "hierarchical": hierarchical(cluster)}

    def arrival(self, name: str, S: float) -> float:
        return _arrival(self, self.costs()[name], S)

    def best(self) -> tuple[str, float]:
        return _pick(self, self.costs())

    def right(self) -> bool:
        return self.name in NAMES and 0 < self.S <= self.G * (1 + 1e-9) and (
            self.arrival(self.name, self.S) <= 1.01 * self.arrival(*self.best()))

    def like(self, other: tuple[str, float]) -> bool:
        return self.name == other[0] and math.isclose(self.S, other[1], rel_tol=0.02)

    def __str__(self) -> str:
        name, S = self.best()
        said = f"{self.name!r}, {self.S / MB:.3g} MB" if isinstance(self.S, float) else f"{self.name!r}"
        late = f", arrives at {self.arrival(self.name, self.S) * 1e3:.0f} ms" if self._computable() else ""
        return (f"choose({self.G / MB:.0f} MB, {self.Tb:g} s, nodes={self.nodes}, per_node={self.per_node}, "
                f"inner={_shown(self.inner)}, uplink={_shown(self.uplink)}) gave {said}{late}; {name!r}, "
                f"{S / MB:.3g} MB arrives at {self.arrival(name, S) * 1e3:.0f} ms")

    def _computable(self) -> bool:
        return self.name in NAMES and 0 < self.S <= self.G * (1 + 1e-9)


@exercise("9.3", title="a bucket for each wire", minutes=8, needs="choose", hints=HINTS, mistakes=MISTAKES)
def choose_the_bucket(answer: Callable, draw: random.Random) -> Verdict:
    """Rows over some sixty clusters: slow uplinks and good ones, high latency and low, one node, one rank a node."""
    cases, single = [], []
    for given in [*(_drawn(draw, kind) for kind in range(5) for _ in range(10)), *_drawn_single(draw)]:
        got = _asked(answer, given)
        if isinstance(got, Row):
            return Verdict((got,), "no_result" if "gave None" in got.seen else "")
        (single if 1 in (got.nodes, got.per_node) else cases).append(got)
    flat, two = [c for c in cases if c.best()[0] == "flat"], [c for c in cases if c.best()[0] != "flat"]
    later = [(c, _asked(answer, c._replace(inner=(4 * c.inner[0], c.inner[1]), uplink=(4 * c.uplink[0], c.uplink[1]))))
             for c in cases[:10]]  # fmt: skip
    shrunk = [b for a, b in later if isinstance(b, Case) and b.name == a.name and b.S < 0.99 * a.S]
    rows = (
        _row("the right algorithm", "the one that arrives first", cases, lambda c: c.name == c.best()[0]),
        _row("its bucket, where the flat ring is better", "arrives within 1 % of the best", flat, Case.right),
        _row("its bucket, where two levels are better", "arrives within 1 % of the best", two, Case.right),
        _row("one node, or one rank on each", "arrives within 1 % of the best", single, Case.right),
        Row("four times the latency", not shrunk, "in the same algorithm no smaller bucket",
            str(shrunk[0]) if shrunk else f"held in {len(later)} of {len(later)} clusters"),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else "upside_down" if shrunk else _mistake(cases, single))


def _asked(answer: Callable, given: Case) -> Case | Row:
    """What the answer chose for one cluster, or the row that says why it is none."""
    arguments = tuple(given[:6])
    shown = (f"choose({given.G:g}, {given.Tb:g}, nodes={given.nodes}, per_node={given.per_node}, inner={given.inner}, "
             f"uplink={given.uplink})")  # fmt: skip
    got = call(answer, *arguments, shown=shown)
    try:
        name, size = got
        return given._replace(name=name, S=float(size))
    except (TypeError, ValueError):
        return Row("returns a name and a size", False, '("flat" or "hierarchical", bytes)', f"{shown} gave {got!r}")


def _mistake(cases: list[Case], single: list[Case]) -> str:
    """The mistake whose answers are those that were given, in all clusters; or the one that shows in a single node, or
    with single ranks, alone."""
    if all(map(Case.right, cases)):
        wrong = [c for c in single if not c.right()]
        return "one_node" if all(c.nodes == 1 for c in wrong) else "one_rank" if all(c.nodes > 1 for c in wrong) else ""
    for key, wrong in _WRONG:
        if all(c.like(wrong(c)) for c in cases):
            return key
    if all(c.name == "flat" for c in cases):
        return "always_flat"
    if all(c.name == "hierarchical" for c in cases):
        return "always_hierarchical"
    return ""


def _arrival(c: Case, cost: LinkCost, S: float) -> float:
    a, b = cost.a_s, cost.beta_s_per_byte
    return max(c.Tb * S / c.G + a * c.G / S + b * c.G, c.Tb + a + b * S)


def _pick(c: Case, costs: dict[str, LinkCost]) -> tuple[str, float]:
    sizes = {name: best_equal_bucket(c.G, c.Tb, cost) for name, cost in costs.items()}
    name = min(sizes, key=lambda each: _arrival(c, costs[each], sizes[each]))
    return name, sizes[name]


def _alpha_once(c: Case) -> tuple[str, float]:
    flat, two = c.costs().values()
    return _pick(c, {"flat": LinkCost(max(c.inner[0], c.uplink[0]), flat.beta_s_per_byte),
                     "hierarchical": LinkCost(c.inner[0] + c.uplink[0], two.beta_s_per_byte)})


def _other_between(c: Case, beta: float) -> tuple[str, float]:
    """Two levels with another time per byte of the bucket between the nodes."""
    g, m = c.per_node, c.nodes
    a = 2 * (g - 1) * c.inner[0] + 2 * (m - 1) * c.uplink[0]
    return _pick(c, c.costs() | {"hierarchical": LinkCost(a, 2 * (g - 1) / g * c.inner[1] + 2 * (m - 1) / m * beta)})


def _average_ring(c: Case) -> tuple[str, float]:
    """A ring whose hops have the mean speed of its messages: one in g leaves the node."""
    return _other_ring(c, *(((c.per_node - 1) * i + u) / c.per_node for i, u in zip(c.inner, c.uplink)))


def _root(c: Case) -> tuple[str, float]:
    costs = c.costs()
    sizes = {name: min(c.G, c.G * math.sqrt(cost.a_s / c.Tb)) for name, cost in costs.items()}
    name = min(sizes, key=lambda each: _arrival(c, costs[each], sizes[each]))
    return name, sizes[name]


def _other_ring(c: Case, alpha: float, beta: float) -> tuple[str, float]:
    """A flat ring with another message."""
    n = c.nodes * c.per_node
    return _pick(c, c.costs() | {"flat": LinkCost(2 * (n - 1) * alpha, 2 * (n - 1) / n * beta)})


_WRONG: tuple[tuple[str, Callable[[Case], tuple[str, float]]], ...] = (
    ("alpha_once", _alpha_once),
    ("free_uplink", lambda c: _other_between(c, c.uplink[1] / c.per_node)),
    ("free_uplink", lambda c: _other_between(c, max(c.uplink[1], c.inner[1]) / c.per_node)),
    ("whole_between", lambda c: _other_between(c, c.uplink[1] * c.per_node)),
    ("whole_between", lambda c: _other_between(c, max(c.uplink[1] * c.per_node, c.inner[1]))),
    ("beyond_the_inside", lambda c: _other_between(c, c.uplink[1])),
    ("average_ring", _average_ring),
    ("average_ring", lambda c: _other_ring(c, *c.uplink)),
    ("root_everywhere", _root),
)


def _row(name: str, expected: str, cases: list[Case], holds: Callable[[Case], bool]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: (c.nodes * c.per_node, c.G))
    seen = str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} clusters"
    return Row(name, not broken, expected, seen)


def _drawn(draw: random.Random, kind: int) -> Case:
    """0: an uplink as good as the wires inside; 1: a slow one; 2: a late one; 3: fast enough to keep up; 4: a late one
    that carries more than all ranks of a node can send, where bytes decide whether it keeps up. Drawn again until the
    two algorithms differ by 3 %."""
    while True:
        m, g = draw.choice([2, 3, 4, 8]), draw.choice([2, 4, 8])
        G, Tb = draw.choice([50, 100, 400]) * MB, draw.choice([0.05, 0.1, 0.3])
        inner = (draw.uniform(5, 30) * 1e-6, draw.uniform(0.2, 0.8) * Tb / G)
        late, slow = ((1, 1), (2, 3), (30, 1.2), (3, 1.1), (30, 0.5 / g))[kind]
        if kind in (2, 3):
            inner = (inner[0], inner[1] / 6)
        elif kind == 4:
            inner = (inner[0], draw.uniform(0.7, 0.95) * Tb / G * m * g / (2 * (m * g - 1)))
        uplink = (inner[0] * late * draw.uniform(1, 1.5), inner[1] * slow * draw.uniform(1, 1.3))
        case = Case(G, Tb, m, g, tuple(float(f"{x:.3g}") for x in inner), tuple(float(f"{x:.3g}") for x in uplink))
        times = sorted(case.arrival(name, best_equal_bucket(G, Tb, cost)) for name, cost in case.costs().items())
        if times[1] > 1.03 * times[0]:
            return case


def _drawn_single(draw: random.Random) -> list[Case]:
    """One node, and nodes of one rank. The uplink is late, and backward faster than any of the wires, so that whoever
    takes one of them for the other is far off."""
    cases = []
    for nodes, per_node in ((1, 4), (1, 8), (4, 1), (8, 1)) * 2:
        G, Tb = draw.choice([50, 100, 400]) * MB, draw.choice([0.05, 0.1, 0.3])
        alpha, beta = float(f"{draw.uniform(5, 30):.3g}") * 1e-6, float(f"{draw.uniform(1, 2) * Tb / G:.3g}")
        cases.append(Case(G, Tb, nodes, per_node, (alpha, beta), (100 * alpha, 1.5 * beta)))
    return cases


def _shown(wire: tuple[float, float]) -> str:
    return f"({wire[0] * 1e6:.3g} µs, {8e-9 / wire[1]:.3g} Gbit/s)"
