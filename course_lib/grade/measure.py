"""The measurement: the learner's reducer on real ranks against a baseline, everything looked at from outside.

Seconds are this process's, bytes are the kernel's where it shapes the wire, and the gradients must be the mean
over ranks of data that the ranks learn only when a step begins. A step that is too cheap is as wrong as one that
is too slow: fewer bytes than the gradient has are a failure, less time than the device or the wire needs is
`impossible`.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from course_lib.grade.gate import Ranks, RanksFailed
from course_lib.grade.outcome import Part
from course_lib.grade.referee import POINTS, by_number
from course_lib.grade.template import Submission, Template
from course_lib.score import fair_score
from course_lib.spread import half_iqr
from course_lib.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable

MEASURED = "measured"
TITLE = "overlap on real ranks"
NEEDED, FINISH = ("4.1", "4.2"), "4.3"
RANKS = 2
LATENCY_S, GBIT, CAP_MB, LAYERS, GRADIENT_MB = 0.006, 0.5, 2.0, 16, 16.0
TARGET_R, VERDICT_RANGE = 0.65, (0.2, 2.0)
REPEATS, WARMUP, MOST_ROUNDS = 5, 1, 5
PASS_AT = 0.3
"""F from which the reducer hides communication. A right one is near 0.85 on an idle machine, one that waits or
launches late is at 0 or below; a busy machine takes from the first."""
LEAST_BYTES, MOST_BYTES = 0.98, 1.5
MB = 2**20


@dataclass(frozen=True)
class Measurement:
    """Medians in seconds, F, the hidden share of communication, and the timelines for the picture."""

    seconds: Mapping[str, float]
    spread_s: float
    fair_score: float
    fair_spread: float
    overlap: float
    timeline: Timeline | None
    expected: Timeline
    facts: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    part: Part
    measurement: Measurement | None = None


def judge(template: Template, submission: Submission, parts: Sequence[Part], seed: int) -> Measured | None:
    """The part that the measurement decides. None for a lab that has nothing to measure.

    Nothing is measured before the exercises it is made of are right.
    """
    if not applies(template):
        return None
    found = by_number(list(parts))
    wrong = [number for number in NEEDED if found[number].outcome != "ok"]
    if wrong:
        sentence = f"Not measured: this needs exercise {' and '.join(wrong)}."
        return Measured(_part(found[wrong[0]].outcome, sentence))
    finish = FINISH in found and found[FINISH].outcome == "ok"
    try:
        return _judge(template, submission, finish, seed)
    except RanksFailed as failed:
        return Measured(_part(failed.outcome, str(failed)))


def applies(template: Template) -> bool:
    """Whether a lab has something to measure."""
    return template.lab == "04" and all(number in template.cells() for number in NEEDED)


def _judge(template: Template, submission: Submission, finish: bool, seed: int) -> Measured:
    numbers = [*NEEDED, *([FINISH] if finish else [])]
    cells = [("<imports>", line) for line in template.prelude(submission.sources[n] for n in numbers)]
    cells += [(f"<exercise {number}>", submission.sources[number]) for number in numbers]
    fabric = {"gbit": GBIT, "latency_us": LATENCY_S * 1e6}
    with Ranks(RANKS, fabric) as baseline, Ranks(RANKS, fabric, cells, finish) as own:
        trial = _Trial(baseline, own, random.Random(f"measure/{seed}"))
        trial.prepare()
        for _ in range(MOST_ROUNDS):
            trial.round()
            measurement = trial.measurement()
            if not _unsure(measurement):
                break
        return Measured(_verdict(measurement), trial.with_timeline(measurement))


class _Trial:
    """Serial baseline, communication alone, compute alone and the submission, in alternation."""

    def __init__(self, baseline: Ranks, own: Ranks, draw: random.Random) -> None:
        self._baseline, self._own, self._draw = baseline, own, draw
        self._seconds: dict[str, list[float]] = {"own": [], "serial": [], "comm": [], "compute": []}
        self._sent: list[float] = []
        self._number = 0
        self._buckets: list[list[int]] = []
        self._load: dict = {}

    def prepare(self) -> None:
        """Let the ranks meet, measure the wire, size the work to r, and run everything once for warmth."""
        self._baseline.meet()
        self._own.meet()
        rough = LATENCY_S + GRADIENT_MB * MB * 8e-9 / GBIT
        self._own.ask({"load": self._sized(rough)})
        self._trusted(lambda: self._baseline.ask({"load": self._sized(rough)}))
        comm = [self._trusted(lambda: self._baseline.step("comm", -1, [1.0] * RANKS))[0] for _ in range(4)]
        self._load = self._sized(statistics.median(comm[1:]))
        self._buckets = self._own.ask({"load": self._load})[0]["buckets"]
        self._trusted(lambda: self._baseline.ask({"load": self._load}))
        for _ in range(WARMUP):
            self._all(keep=False)

    def round(self) -> None:
        for _ in range(REPEATS):
            self._all(keep=True)

    def measurement(self) -> Measurement:
        medians = {name: statistics.median(values) for name, values in self._seconds.items()}
        given = (self._load["forward_ms"] + self._load["backward_ms"]) * 1e-3
        own, serial, Tm = medians["own"], medians["serial"], medians["comm"]
        spread = max(half_iqr(self._seconds["own"]), 0.02 * own)
        gain = max(serial - max(given, Tm), 1e-9)
        noise = sum(_doubt(self._seconds[name]) for name in ("own", "serial")) / gain
        score = fair_score(serial, own, given, Tm, spread=spread)
        hidden = max(0.0, min(1.0, 1 - (own - given) / Tm))
        facts = {"bytes_by": self._own.counted_by, "fabric": self._own.kind, "rounds": len(self._seconds["own"]),
                 "r": round(Tm / given, 3), "bytes_sent": min(self._sent), "compute_s": given,
                 **{f"{name}_s": round(value, 5) for name, value in medians.items()}}  # fmt: skip
        value = score.value if score.value is not None else 0.0
        return Measurement(medians | {"given": given}, spread, value, noise, hidden, None, self._expected(Tm), facts)

    def with_timeline(self, measurement: Measurement) -> Measurement:
        """With what the learner's ranks recorded themselves: a picture for people, not evidence."""
        try:
            answers = self._own.ask({"stop": True})
            rows = [row for answer in answers for row in answer["spans"]]
            timeline = Timeline.of(rows, str(answers[0]["provenance"])[:200])
        except (RanksFailed, KeyError, TypeError, ValueError):
            return measurement
        return Measurement(**{**measurement.__dict__, "timeline": timeline})

    def _all(self, keep: bool) -> None:
        """One step of each kind. Every one starts with data that were drawn just now."""
        self._number += 1
        names = list(self._seconds)
        shift = self._number % len(names)
        for name in names[shift:] + names[:shift]:
            nonces = [self._draw.uniform(0.5, 1.5) for _ in range(RANKS)]
            if name == "own":
                seconds, sent = self._own.step(name, self._number, nonces)
                self._refuse_wrong(sent, nonces)
                if keep:
                    self._sent += sent
            else:
                seconds, _ = self._trusted(lambda name=name, n=nonces: self._baseline.step(name, self._number, n))
            if keep:
                self._seconds[name].append(seconds)

    def _refuse_wrong(self, sent: Sequence[float], nonces: Sequence[float]) -> None:
        """Raise `RanksFailed` unless the bytes were sent that the gradient has, and the gradients are right."""
        need = 2 * (RANKS - 1) / RANKS * GRADIENT_MB * MB
        who = "the kernel's counters say" if self._own.counted_by == "kernel" else "the wire's own count says"
        for rank, count in enumerate(sent):
            shares = (f"rank {rank} sent {count / MB:.1f} MB in a step, and an all-reduce of the gradient needs "
                      f"{need / MB:.0f}")  # fmt: skip
            if count < LEAST_BYTES * need:
                raise RanksFailed("failed_checks", f"Too few bytes: {who} that {shares}. What is not sent cannot be "
                                  "summed.")  # fmt: skip
            if count > MOST_BYTES * need:
                raise RanksFailed("failed_checks", f"Too many bytes: {who} that {shares}. Is a bucket sent twice?")
        sizes = LAYERS * [round(GRADIENT_MB / LAYERS * MB / 4)]
        places = [[p, self._draw.randrange(sizes[p])] for p in range(LAYERS) for _ in range(4)]
        right = _mean_gradient(places, nonces)
        largest = max(abs(value) for value in right)
        for rank, answer in enumerate(self._own.ask({"places": places})):
            values = answer.get("values")
            if not isinstance(values, list) or len(values) != len(right) or not all(type(v) is float for v in values):
                raise RanksFailed("failed_checks", f"Rank {rank} has no gradients to show.")
            if any(not abs(value - wanted) <= 1e-3 * largest for value, wanted in zip(values, right)):
                raise RanksFailed("failed_checks", f"After the step the gradients on rank {rank} are not the mean over "
                                  "ranks.")  # fmt: skip

    def _sized(self, Tm: float) -> dict:
        compute_ms = Tm / TARGET_R * 1e3
        return {"layers": LAYERS, "gradient_mb": GRADIENT_MB, "forward_ms": compute_ms / 3,
                "backward_ms": compute_ms * 2 / 3, "cap_mb": CAP_MB}  # fmt: skip

    def _expected(self, Tm: float) -> Timeline:
        """The same buckets as the model of the lab predicts them on this wire."""
        from course_lib.link_cost import LinkCost
        from course_lib.simulate.buckets import GradientProfile, predict, uniform_plan

        backward = self._load["backward_ms"] * 1e-3
        size = round(GRADIENT_MB / LAYERS * MB)
        ready = [backward * (LAYERS - layer) / LAYERS for layer in range(LAYERS)]
        profile = GradientProfile.sorted([f"layer {i}" for i in range(LAYERS)], [size] * LAYERS, ready,
                                         self._load["forward_ms"] * 1e-3, backward, N=1)  # fmt: skip
        link = LinkCost(LATENCY_S, max(Tm - LATENCY_S, 1e-6) / (GRADIENT_MB * MB))
        return predict(profile, link, uniform_plan(profile, CAP_MB * MB)).timeline

    @staticmethod
    def _trusted(do: Callable):
        """The baseline has nothing of the learner's in it, so its failure is the grader's."""
        try:
            return do()
        except RanksFailed as failed:
            raise RuntimeError(f"the baseline failed: {failed}") from failed


def _verdict(m: Measurement) -> Part:
    own, serial, Tm, given = (m.seconds[name] * 1e3 for name in ("own", "serial", "comm", "given"))
    said = (f"A step takes {own:.0f} ms; one all-reduce after backward {serial:.0f} ms; the limit is "
            f"{max(given, Tm):.0f} ms. F = {m.fair_score:.2f} ± {m.fair_spread:.2f}, and {m.overlap:.0%} of the "
            "communication is hidden.")  # fmt: skip
    if own < max(given, Tm) - m.spread_s * 1e3:
        return _part("impossible", f"{said} A step cannot be shorter than its compute or its communication: work is "
                     "missing. A person decides.", None)  # fmt: skip
    r = m.seconds["comm"] / m.seconds["given"]
    if _unsure(m) or not VERDICT_RANGE[0] <= r <= VERDICT_RANGE[1]:
        return _part("timing_unstable", f"{said} The machine was too busy to tell; nothing is held against you.", None)
    if m.fair_score < PASS_AT:
        return _part("failed_checks", f"{said} At least {PASS_AT} is wanted: do buckets leave during backward, and "
                     "does nothing wait there?")  # fmt: skip
    return Part(MEASURED, TITLE, "ok", POINTS, POINTS, said)


def _unsure(m: Measurement) -> bool:
    """Whether the spread is wider than the distance to the pass mark."""
    return m.fair_spread > abs(m.fair_score - PASS_AT)


def _doubt(values: Sequence[float]) -> float:
    """How far the median may be off: 1.57 times the distance of the quartiles over the root of their number, as the
    notch of a box plot. (McGill, Tukey and Larsen, Variations of box plots, The American Statistician 32, 1978.)"""
    return 1.57 * 2 * half_iqr(values) / len(values) ** 0.5


def _part(outcome: str, sentence: str, points: float | None = 0.0) -> Part:
    return Part(MEASURED, TITLE, outcome, points, POINTS, sentence)


def _mean_gradient(places: Sequence[Sequence[int]], nonces: Sequence[float]) -> list[float]:
    """What the mean over ranks must be at these places, computed here."""
    import torch

    from course_lib.lab.workbench.gradients import loss_of
    from course_lib.train import emulated

    model = emulated.equal(LAYERS, GRADIENT_MB / LAYERS, 0.0, 0.0)
    total = torch.zeros(len(places))
    for rank, nonce in enumerate(nonces):
        for param in model.parameters():
            param.grad = None
        loss_of(lambda x, nonce=nonce: model(x * nonce), rank, 0, 1).backward()
        params = list(model.parameters())
        total += torch.tensor([float(params[p].grad[i]) for p, i in places])
    return (total / len(nonces)).tolist()
