"""ZeRO on a wire: when each unit's parameters are gathered and its gradient reduced, and what of it is exposed.

The order of events is that of `train.Sharded` for equal units. The wire is shared: gathers and reductions have a queue
each, and while both move bytes each gets half of the rate. Compute waits for the gather of the unit that it needs; in
stages 2 and 3 one reduction travels at a time, so backward waits for it before it hands over the next.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from course_lib.link_cost import LinkCost
from course_lib.timeline import Span, Timeline


class Units(NamedTuple):
    """A model of `count` equal units of `bytes` each. `Tf` and `Tb` are seconds of forward and of backward of *one
    unit* in one micro-step."""

    count: int
    bytes: float
    Tf: float
    Tb: float


class ZeroPrediction(NamedTuple):
    """One window. Seconds; spans are of rank 0 and step 0, provenance `simulated`."""

    step_s: float
    exposed_s: float
    timeline: Timeline


def predict_zero(units: Units, N: int, gather: LinkCost, reduce: LinkCost, stage: int,
                 ahead: int = 1) -> ZeroPrediction:
    """A window of N micro-steps, from the first forward to the last reduction.

    `gather` and `reduce` are what an all-gather and a reduce-scatter of S bytes cost on an idle wire. `ahead` units
    are gathered before they are needed in stage 3; stages 1 and 2 gather all when the window begins, because the
    optimizer has just stepped. Stage 1 reduces in the last micro-step only. Raises `ValueError` for another stage, a
    negative `ahead`, or no micro-step.
    """
    if stage not in (1, 2, 3) or ahead < 0 or N < 1:
        raise ValueError(f"stage={stage}, ahead={ahead}, N={N}: choose stage 1, 2 or 3, 0 or more units ahead, and one "
                         "micro-step at least")
    run = _Window(units, gather, reduce, stage, ahead)
    for i in range(N):
        run.forward(i)
        run.backward(i, reduces=stage > 1 or i == N - 1)
    run.wait(*run.flying)
    compute_s = N * units.count * (units.Tf + units.Tb)
    spans = [*run.spans, *run.wire.spans(), _span("step", "step", "step 0", 0.0, run.now)]
    return ZeroPrediction(run.now, run.now - compute_s, Timeline.of(spans, "simulated"))


@dataclass
class _Transfer:
    """`latency` and `work` are what is left of it, in seconds on an idle wire."""

    name: str
    unit: int
    bytes: float
    latency: float
    work: float
    begin: float | None = None
    end: float | None = None


@dataclass
class _Wire:
    """Two queues, each in order; what moves bytes at the same time shares the rate."""

    now: float = 0.0
    queues: dict[str, deque[_Transfer]] = field(default_factory=lambda: {"gather": deque(), "reduce": deque()})
    done: list[_Transfer] = field(default_factory=list)

    def advance(self, until: float) -> None:
        """Let the wire work until this time."""
        while self.now < until and self._move(until):
            pass
        self.now = max(self.now, until)

    def finish(self, transfer: _Transfer) -> float:
        """Let it work until a transfer has ended; when that is."""
        while transfer.end is None:
            self._move(float("inf"))
        return transfer.end

    def _move(self, until: float) -> bool:
        """To the next moment at which something changes, or to `until`. Was there anything to move?"""
        heads = [queue[0] for queue in self.queues.values() if queue]
        if not heads:
            return False
        for head in heads:
            head.begin = self.now if head.begin is None else head.begin
        moving = sum(not head.latency for head in heads)
        span = min(until - self.now, *(head.latency or head.work * moving for head in heads))
        for head in heads:
            if head.latency:
                head.latency = _less(head.latency, span)
            else:
                head.work = _less(head.work, span / moving)
        self.now += span
        for queue in self.queues.values():
            if queue and not queue[0].latency and not queue[0].work:
                queue[0].end = self.now
                self.done.append(queue.popleft())
        return True

    def spans(self) -> list[Span]:
        return [_span("comm", "wire", t.name, t.begin or 0.0, t.end or 0.0, round(t.bytes), t.unit) for t in self.done]


@dataclass
class _Window:
    units: Units
    gather: LinkCost
    reduce: LinkCost
    stage: int
    ahead: int
    now: float = 0.0
    wire: _Wire = field(default_factory=_Wire)
    whole: dict[int, _Transfer | None] = field(default_factory=dict)
    flying: list[_Transfer] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def forward(self, i: int) -> None:
        order = list(range(self.units.count))
        for place, unit in enumerate(order):
            self.need(order, place)
            self.compute(f"forward {i}", unit, self.units.Tf)
            if self.stage == 3 and unit != order[-1]:
                del self.whole[unit]

    def backward(self, i: int, reduces: bool) -> None:
        order = list(range(self.units.count))[::-1]
        for place, unit in enumerate(order):
            if reduces and place:
                self.send(order[place - 1])
            self.need(order, place)
            self.compute(f"backward {i}", unit, self.units.Tb)
            if self.stage == 3:
                del self.whole[unit]
        if reduces:
            self.send(order[-1])

    def need(self, order: list[int], place: int) -> None:
        """Issue what is due by now, and wait for the unit at this place."""
        ahead = self.ahead if self.stage == 3 else len(order)
        for unit in order[place:place + 1 + ahead]:
            if unit not in self.whole:
                self.whole[unit] = self.issue("gather", "all_gather", unit, self.gather)
        if (coming := self.whole[order[place]]) is not None:
            self.wait(coming)
            self.whole[order[place]] = None

    def send(self, unit: int) -> None:
        if self.stage > 1:
            self.wait(*self.flying)
            self.flying.clear()
        self.flying.append(self.issue("reduce", "reduce_scatter", unit, self.reduce))

    def issue(self, queue: str, name: str, unit: int, cost: LinkCost) -> _Transfer:
        size = self.units.bytes
        transfer = _Transfer(name, unit, size, cost.a_s, cost.beta_s_per_byte * size)
        self.wire.queues[queue].append(transfer)
        return transfer

    def wait(self, *transfers: _Transfer) -> None:
        for transfer in transfers:
            self.now = max(self.now, self.wire.finish(transfer))

    def compute(self, what: str, unit: int, seconds: float) -> None:
        self.spans.append(_span("compute", "device", f"{what}, unit {unit}", self.now, self.now + seconds))
        self.now += seconds
        self.wire.advance(self.now)


def _less(left: float, taken: float) -> float:
    """What is left; a rounding error is nothing."""
    return left - taken if left - taken > 1e-12 else 0.0


def _span(kind: str, lane: str, name: str, start: float, stop: float, size: int = -1, unit: int = -1) -> Span:
    return Span(0, kind, lane, name, round(start * 1e9), round(stop * 1e9), size, unit, 0)
