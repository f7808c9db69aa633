"""Exercise 2.2: predict the baseline's step time.

The learner writes `predict_baseline(sizes_bytes, N, Tf_s, Tb_s, a_s, beta_s_per_byte, flat)`:

- `sizes_bytes` lists the bytes of each parameter's gradient; one update has `N` micro-steps of `Tf_s` forward and
  `Tb_s` backward; one collective costs `a_s` plus `beta_s_per_byte` for each byte.
- After every micro-step all gradients are sent, blocking: one collective a parameter, or with `flat` one for all.
- The result is `(collectives, bytes_sent, step_s)` of one update: how many collectives, how many bytes were handed
  to them, and the seconds of the update.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from course_lib.lab.guard import call
from course_lib.lab.model import Row, Verdict, exercise

HINTS = (
    "Count first. How many collectives does one micro-step make, and how many does the update? Each costs a. Then the "
    "bytes: each micro-step sends the whole gradient.",
    "Blocking means that nothing runs beside it. So the update takes its compute, N times forward and backward, plus "
    "its communication, and nothing is subtracted.",
    "collectives = N if flat else N * len(sizes_bytes); bytes_sent = N * sum(sizes_bytes); step_s = N * (Tf_s + Tb_s) "
    "+ collectives * a_s + beta_s_per_byte * bytes_sent.",
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end?",
    "bytes_once": "You count the bytes of one micro-step. This baseline sends the whole gradient after each of the N.",
    "latency_once": "You count the latency once in a micro-step, or once in all. Every collective pays it, and without "
    "`flat` each parameter is one.",
    "sends_once": "You send after the last micro-step only. That is lab 03; this baseline sends after each.",
    "compute_once": "You count the compute of one micro-step. One update runs forward and backward N times.",
    "overlaps": "You take the larger of compute and communication. Nothing overlaps here: each waits for the other to "
    "end, so their times add up.",
    "flat_the_same": "`flat` changes nothing in your prediction, or you count one collective a parameter in both "
    "cases. With `flat` all gradients of a micro-step travel in one.",
    "flat_upside_down": "`flat` is the wrong way round: with it there is one collective a micro-step, without it one "
    "for each parameter.",
    "ignores_latency": "Your time is compute plus bytes. Each collective also costs `a_s` before its first byte moves.",
}


class Case(NamedTuple):
    """One update: its arguments, and what came back."""

    sizes: list[int]
    N: int
    Tf: float
    Tb: float
    a: float
    beta: float
    flat: bool
    got: tuple[float, float, float]

    def count(self, flat: bool | None = None) -> int:
        return self.N * (1 if (self.flat if flat is None else flat) else len(self.sizes))

    def bytes(self) -> int:
        return self.N * sum(self.sizes)

    def time(self, compute: float = 1, collectives: float | None = None, bytes: float | None = None) -> float:
        """Seconds with that many computed micro-steps (as a factor), collectives and bytes."""
        count = self.count() if collectives is None else collectives
        sent = self.bytes() if bytes is None else bytes
        return compute * self.N * (self.Tf + self.Tb) + count * self.a + sent * self.beta

    def right(self) -> bool:
        return self.got[:2] == (self.count(), self.bytes()) and self.takes(self.time())

    def takes(self, seconds: float) -> bool:
        return abs(self.got[2] - seconds) <= 1e-6 * seconds

    def __str__(self) -> str:
        return f"{_shown(self.arguments())} gave ({self.got[0]:g}, {self.got[1]:g}, {self.got[2]:.6g})"

    def arguments(self) -> tuple:
        return list(self.sizes), self.N, self.Tf, self.Tb, self.a, self.beta, self.flat


@exercise("2.2", title="predict the baseline", minutes=6, needs="predict_baseline", hints=HINTS, mistakes=MISTAKES)
def predict_the_baseline(answer: Callable, draw: random.Random) -> Verdict:
    """Rows over the example of the text and some thirty updates drawn by chance."""
    arguments = [([1000, 3000], 2, 0.01, 0.02, 0.004, 1e-6, False), *(_drawn(draw, n % 2 == 0) for n in range(30))]
    cases = []
    for given in arguments:
        shown = _shown(given)
        got = call(answer, list(given[0]), *given[1:], shown=shown)
        try:
            collectives, sent, step = (float(number) for number in got)
        except (TypeError, ValueError):
            row = Row("returns three numbers", False, "(collectives, bytes_sent, step_s)", f"{shown} gave {got!r}")
            return Verdict((row,), "no_result" if got is None else "")
        cases.append(Case(*given, (collectives, sent, step)))
    each, flat = [c for c in cases if not c.flat], [c for c in cases if c.flat]
    rows = (
        Row("the example of the text", cases[0].right(), "(4, 8000, 0.084)", str(cases[0])),
        _row("collectives, one a parameter", "N times the number of parameters", each, lambda c: c.got[0] == c.count()),
        _row("collectives, flat", "N", flat, lambda c: c.got[0] == c.count()),
        _row("bytes of the update", "N times the whole gradient", cases, lambda c: c.got[1] == c.bytes()),
        _row("seconds, one collective a parameter", "compute and communication, added", each,
             lambda c: c.takes(c.time())),
        _row("seconds, flat", "the same with fewer latencies", flat, lambda c: c.takes(c.time())),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(cases, each, flat))


def _mistake(cases: list[Case], each: list[Case], flat: list[Case]) -> str:
    """The mistake that explains what all cases show; the plainest one first."""
    if all(c.got[0] == c.count(flat=not c.flat) for c in cases):
        return "flat_upside_down"
    if all(c.takes(c.time(collectives=c.count() / c.N, bytes=sum(c.sizes))) for c in cases):
        return "sends_once"
    if all(c.got[1] == sum(c.sizes) for c in cases) or all(c.takes(c.time(bytes=sum(c.sizes))) for c in cases):
        return "bytes_once"
    if all(c.takes(c.time(collectives=0)) for c in cases):
        return "ignores_latency"
    for count in (lambda c: 1, lambda c: c.N, lambda c: c.count() / c.N):
        if all(c.takes(c.time(collectives=count(c))) or c.got[0] == count(c) for c in each):
            return "latency_once"
    if all(c.takes(c.time(compute=1 / c.N)) for c in cases):
        return "compute_once"
    if all(c.takes(max(c.time(compute=0), c.time() - c.time(compute=0))) for c in cases):
        return "overlaps"
    if all(c.got[0] == c.count(flat=False) for c in flat) or all(
            c.takes(c.time(collectives=c.count(flat=False))) for c in flat):  # fmt: skip
        return "flat_the_same"
    return ""


def _row(name: str, expected: str, cases: list[Case], holds: Callable[[Case], bool]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: (len(c.sizes), c.N))
    seen = str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} updates"
    return Row(name, not broken, expected, seen)


def _drawn(draw: random.Random, flat: bool) -> tuple:
    """Compute and communication of the same order, several parameters, several micro-steps."""
    sizes = [4 * draw.randint(50, 5000) for _ in range(draw.randint(2, 6))]
    return (sizes, draw.randint(2, 8), draw.randint(5, 20) / 1000, draw.randint(10, 40) / 1000,
            draw.randint(1, 8) / 1000, draw.choice([0.5, 1, 2, 4]) * 1e-6, flat)  # fmt: skip


def _shown(given: tuple) -> str:
    sizes, N, Tf, Tb, a, beta, flat = given
    times = f"Tf_s={Tf:g}, Tb_s={Tb:g}, a_s={a:g}, beta_s_per_byte={beta:g}"
    return f"predict_baseline({sizes}, N={N}, {times}, flat={flat})"
