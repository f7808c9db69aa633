"""Exercise 5.3: the bucket size S* that the sweep should find.

The learner writes `best_size(G_bytes, a_s, beta_s_per_byte, Tb_s)`:

- Backward takes `Tb_s` and produces `G_bytes` of gradient evenly. They are cut into equal buckets of S bytes.
- A bucket costs `a_s + beta_s_per_byte * S` on the wire. One travels at a time.
- While the wire cannot keep up, the last bucket arrives at A(S) = Tb·S/G + a·G/S + β·G: the first bucket has to fill,
  then the wire never pauses. While it can, at B(S) = Tb + a + β·S: only the last bucket is left when backward ends.
  Whichever is later counts.
- The result is the S between 0 and G for which it arrives first. G/S need not be whole.

The check states these rules, and searches. The model is that of `course_lib.simulate.buckets` for many small gradients.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

from course_lib.lab.guard import call
from course_lib.lab.model import Row, Verdict, exercise

MB = 2**20

HINTS = (
    "Begin with A alone, as if the wire were never fast enough. Tb·S/G grows with S, a·G/S falls with it, and β·G does "
    "not depend on it. Where is their sum least?",
    "A is least at S = G·√(a/Tb). Then ask from where on the wire keeps up: A(S) = B(S) when all buckets together take "
    "as long as backward, a·G/S + β·G = Tb. Beyond that S, B counts, and B only grows.",
    "root = G * sqrt(a / Tb); keeps_up = a * G / (Tb - beta * G) if Tb > beta * G else infinity; the answer is the "
    "smallest of root, keeps_up and G.",
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end?",
    "ignores_latency": "Your size does not change with `a_s`. Without latency the smallest bucket is always best; it "
    "is the latency, paid once a bucket, that makes small ones dear.",
    "upside_down": "Your buckets shrink when the latency grows. Each bucket pays a: high latency wants *fewer*, larger "
    "buckets. The fraction under the root is a/Tb.",
    "always_the_root": "On a fast wire your size is too large. Once the wire keeps up with backward, only the last "
    "bucket is exposed, and the smallest size that still keeps up wins: a·G/(Tb − β·G).",
    "only_keeps_up": "You take the smallest size with which the wire keeps up with backward, whatever the wire. On a "
    "slow one there is none, or a far too large one: there G·√(a/Tb) arrives first.",
    "larger_of_both": "You take the larger of the two candidates. Below the size where the wire keeps up, A counts; "
    "A may have its minimum before: the smaller one is right.",
    "above_the_gradient": "Your size is larger than the whole gradient. With a large latency one bucket for everything "
    "is best: return G then.",
    "no_root": "The square root is missing: S* grows with the root of a/Tb, not with a/Tb.",
    "wire_for_backward": "Under your root stands the time of the wire. It is the time of backward: it decides how long "
    "the wire stands idle until the first bucket is full.",
}


TOLERANCE = 1e-3
"""Of the arrival: a search over a thousand sizes is right too, and the curve is flat where it is least."""


class Case(NamedTuple):
    G: float
    a: float
    beta: float
    Tb: float
    got: float

    def arrival(self, S: float) -> float:
        """When the last bucket of size S has arrived, in seconds from the start of backward."""
        return max(self.Tb * S / self.G + self.a * self.G / S + self.beta * self.G, self.Tb + self.a + self.beta * S)

    def right(self) -> float:
        """By search: the arrival falls to one minimum and rises after it."""
        low, high = 1e-9 * self.G, self.G
        for _ in range(200):
            left, right = low + (high - low) / 3, high - (high - low) / 3
            low, high = (low, right) if self.arrival(left) <= self.arrival(right) else (left, high)
        return low

    def gave(self, S: float) -> bool:
        return math.isclose(self.got, S, rel_tol=1e-4)

    @property
    def root(self) -> float:
        return self.G * math.sqrt(self.a / self.Tb)

    @property
    def keeps_up(self) -> float:
        spare = self.Tb - self.beta * self.G
        return self.a * self.G / spare if spare > 0 else math.inf

    def __str__(self) -> str:
        return f"{_shown(self[:4])} gave {self.got / MB:.4g} MB"


@exercise("5.3", title="the best bucket size", minutes=8, needs="best_size", hints=HINTS, mistakes=MISTAKES)
def the_best_size(answer: Callable[[float, float, float, float], float], draw: random.Random) -> Verdict:
    """Rows for the example of the text, for slow and fast wires, for the latency, and for one bucket."""
    sets = {"example": [(16 * MB, 0.004, 8e-9, 0.1)], "slow": [_drawn(draw, slow=True) for _ in range(12)],
            "fast": [_drawn(draw, slow=False) for _ in range(12)]}  # fmt: skip
    sets["latency"] = [(G, a * factor, beta, Tb) for G, a, beta, Tb in sets["slow"][:4] for factor in (1, 4)]
    sets["one bucket"] = [(G, Tb * draw.uniform(1.5, 3), beta, Tb) for G, _, beta, Tb in sets["slow"][:4]]
    cases: dict[str, list[Case]] = {}
    for kind, wires in sets.items():
        cases[kind] = []
        for wire in wires:
            got = call(answer, *wire, shown=_shown(wire))
            if got is None:
                row = Row("returns a size", False, "a number of bytes", f"{_shown(wire)} gave None")
                return Verdict((row,), "no_result")
            try:
                cases[kind].append(Case(*wire, float(got)))
            except (TypeError, ValueError, OverflowError):
                return Verdict((Row("returns a number", False, "bytes", f"{_shown(wire)} gave {got!r}"),))
    rows = (
        _row("the example of the text", "3.2 MB", cases["example"]),
        _row("a wire that is slower than backward", "the least A(S)", cases["slow"]),
        _row("a wire that keeps up", "the smallest S that keeps up, if it comes first", cases["fast"]),
        _row("four times the latency", "larger buckets", cases["latency"]),
        _row("a latency longer than backward", "one bucket of G bytes", cases["one bucket"]),
    )
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(cases))


def _mistake(cases: dict[str, list[Case]]) -> str:
    """The mistake that explains what all cases show; the plainest one first."""
    every = [case for some in cases.values() for case in some]
    pairs = list(zip(cases["latency"][::2], cases["latency"][1::2]))
    wrong: dict[str, tuple[Callable[[Case], float], ...]] = {
        "above_the_gradient": (lambda c: min(c.root, c.keeps_up),),
        "always_the_root": (lambda c: c.root, lambda c: min(c.root, c.G)),
        "only_keeps_up": (lambda c: c.keeps_up, lambda c: min(c.keeps_up, c.G),
                          lambda c: c.a * c.G / (c.Tb - c.beta * c.G)),
        "larger_of_both": (lambda c: max(c.root, c.keeps_up), lambda c: min(max(c.root, c.keeps_up), c.G)),
        "no_root": (lambda c: c.G * c.a / c.Tb, lambda c: min(c.G * c.a / c.Tb, c.G),
                    lambda c: min(c.G * c.a / c.Tb, c.keeps_up, c.G)),
        "wire_for_backward": tuple(
            lambda c, wire=wire, least=least: min(c.G * math.sqrt(c.a / wire(c)), *least(c))
            for wire in (lambda c: c.beta * c.G, lambda c: c.a + c.beta * c.G)
            for least in (lambda c: (math.inf,), lambda c: (c.G,), lambda c: (c.keeps_up, c.G))),
    }  # fmt: skip
    for mistake, values in wrong.items():
        if any(all(c.gave(value(c)) for c in every) for value in values):
            return mistake
    if all(math.isclose(low.got, high.got, rel_tol=1e-6) for low, high in pairs):
        return "ignores_latency"
    if all(high.got < low.got * (1 - 1e-9) for low, high in pairs):
        return "upside_down"
    return ""


def _row(name: str, expected: str, cases: list[Case]) -> Row:
    """A size is right if no other makes the last bucket arrive noticeably sooner, and it lies between 0 and G."""
    for c in cases:
        right = c.right()
        inside = math.isfinite(c.got) and 0 < c.got <= c.G * (1 + 1e-9)
        if not inside or c.arrival(c.got) > c.arrival(right) * (1 + TOLERANCE):
            later = f", which arrives {(c.arrival(c.got) - c.arrival(right)) * 1e3:.3g} ms later" if inside else ""
            return Row(name, False, expected, f"{c}{later}; the best is {right / MB:.4g} MB")
    return Row(name, True, expected, f"held on {len(cases)} of {len(cases)} wires")


def _drawn(draw: random.Random, slow: bool) -> tuple[float, float, float, float]:
    """G, a, β, Tb. Slow: all bytes take longer than backward. Fast: a part of it, and latency matters."""
    G, Tb = draw.randint(4, 64) * MB, draw.randint(40, 200) / 1000
    beta = Tb / G * (draw.uniform(1.1, 3) if slow else draw.uniform(0.2, 0.6))
    return G, Tb * draw.uniform(0.002, 0.05), beta, Tb


def _shown(wire: tuple) -> str:
    G, a, beta, Tb = wire
    return f"best_size({G / MB:g} * MB, a_s={a:.4g}, beta_s_per_byte={beta:.4g}, Tb_s={Tb:.4g})"
