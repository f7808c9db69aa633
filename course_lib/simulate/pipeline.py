"""A pipeline schedule with costs: when each action starts and ends on every rank, and how much is bubble.

Compute of a rank runs one action after the other. A message starts when it was sent, when the messages before
it on the same way have arrived and, but for its latency, when its receive is posted; it costs a + β·S. Gathers and
reductions of a rank share one wire and run in the order in which they are listed; a step waits for its reductions, and
compute for the gathers of its stage. Times are whole nanoseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from course_lib.link_cost import LinkCost
from course_lib.schedule.action import BACKWARD, COMPUTE, RECEIVES, SENDS, WHOLE, Action, Op, Schedule
from course_lib.schedule.check import check
from course_lib.schedule.cycle import carried, covers
from course_lib.schedule.messages import with_messages
from course_lib.timeline import Span, Timeline, length, union

Each = float | Sequence[float]
FREE = LinkCost(0.0, 0.0)


@dataclass(frozen=True)
class Costs:
    """Seconds of each action of one micro-batch: one number for all stages, or one a stage. B is I + W unless given.

    `link` and `message_bytes` are one for all boundaries between stages, or one a boundary (stage s to s + 1): the
    cost of one message and its bytes, the same in both directions. `exchange` is the all-to-all where a rank hands over
    to its own next stage (`schedule.experts`), one for all boundaries or one a boundary. `gather`, `reduce` and `step`
    are seconds of one collective and of the optimizer of a stage. Where the schedule names buckets, a reduction is that
    of one bucket, and a gather or step of a single bucket takes its share (1/buckets) of that of the stage. Raises
    `ValueError` on a negative cost or on another number of them than the schedule has stages.
    """

    F: Each
    I: Each = 0.0  # noqa: E741  the field's own letter
    W: Each = 0.0
    B: Each | None = None
    link: LinkCost | Sequence[LinkCost] = FREE
    message_bytes: int | Sequence[int] = 0
    exchange: Each = 0.0
    gather: Each = 0.0
    reduce: Each = 0.0
    step: Each = 0.0

    def ns(self, op: Op, stage: int, stages: int) -> int:
        """Nanoseconds of one action of a stage."""
        if op is Op.B and self.B is None:
            return self.ns(Op.I, stage, stages) + self.ns(Op.W, stage, stages)
        seconds = _entry(getattr(self, op.value), op.value, stage, stages)
        if seconds < 0:
            raise ValueError(f"{op.value} of stage {stage} costs {seconds} s; a time is 0 or more")
        return round(seconds * 1e9)

    def action_ns(self, schedule: Schedule, action: Action) -> int:
        """Nanoseconds of one action of a schedule: of a gather or step of one bucket, its share of the stage's."""
        whole = self.ns(action.op, action.stage, schedule.stages)
        alone = action.op in (Op.GATHER, Op.STEP) and action.index != WHOLE
        return whole // schedule.buckets[action.stage] if alone else whole

    def message(self, boundary: int, stages: int) -> tuple[int, int, int]:
        """(bytes, nanoseconds of latency, nanoseconds of transfer) from one stage to the next, or back."""
        link = _entry(self.link, "link", boundary, stages - 1)
        size = int(_entry(self.message_bytes, "message_bytes", boundary, stages - 1))
        return size, round(link.a_s * 1e9), round(link.beta_s_per_byte * size * 1e9)


def _entry(value, name: str, index: int, count: int):
    if not isinstance(value, Sequence):
        return value
    if len(value) != count:
        raise ValueError(f"{len(value)} values of {name} where the schedule has {count}; give one for each or "
                         "a single one")
    return value[index]


class Prediction(NamedTuple):
    """`step_s` seconds from the first action to the end of the last, `bubble` as the function of that name
    gives it, and the spans (step k for pass k, starting at 0 ns, provenance `simulated`)."""

    step_s: float
    bubble: float
    timeline: Timeline


def predict(schedule: Schedule, costs: Costs, passes: int = 1) -> Prediction:
    """What `passes` passes of the schedule take, one right after the other. Messages are added where it has none
    (`with_messages`). Raises `ScheduleError` for a schedule that cannot run and `ValueError` for costs that do not fit
    it."""
    run = _replay(schedule, costs, passes)
    end = max(span.stop for span in run.spans)
    for k in range(passes):
        for rank in range(len(schedule.ranks)):
            mine = [s for s in run.spans if s.rank == rank and s.step == k] if passes > 1 else run.spans
            start, stop = (min(s.start for s in mine), max(s.stop for s in mine)) if passes > 1 else (0, end)
            run.spans.append(Span(rank, "step", "step", f"step {k}", start, stop, -1, -1, k))
    timeline = Timeline.of(run.spans, "simulated")
    return Prediction(end / 1e9, bubble(timeline), timeline)


def period(schedule: Schedule, costs: Costs, passes: int = 4) -> float:
    """Seconds by which a pass ends later than the one before, once passes follow each other: what an update takes in a
    long run, where the end of one overlaps with the beginning of the next. The mean over the second half of
    `passes` passes. Raises as `predict`."""
    ends: list[int] = []  # as `updates` finds them, without making spans of a long run
    _replay(schedule, costs, passes, lambda run: ends.append(max(run.now)))
    half = passes // 2
    return (ends[-1] - ends[half - 1]) / (passes - half) / 1e9


def _replay(schedule: Schedule, costs: Costs, passes: int, then: Callable[[_Run], None] = lambda _: None) -> _Run:
    """All passes; `then` is called after each."""
    if passes < 1:
        raise ValueError(f"passes={passes}: give at least one")
    schedule = with_messages(schedule)
    order, run = check(schedule).order, _Run(schedule, costs)
    for run.step in range(passes):
        for rank, action in order:
            run.do(rank, action)
        run.end()
        then(run)
    return run


class _Run:
    """Clocks of simulated passes."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs, self.spans = schedule, costs, []
        self.step = 0  # the pass that is under way
        carries = [carried(schedule, rank) for rank in range(len(schedule.ranks))]
        self.first_of_all = {a for steps in carries for a in steps}  # steps for which the first pass has no gradient
        self.now = [0] * len(schedule.ranks)  # until when the rank computes
        self.wire = [0] * len(schedule.ranks)  # until when its collectives keep the wire
        self.exchanging = [0] * len(schedule.ranks)  # until when its all-to-all do
        self.way: dict[tuple[int, int], int] = defaultdict(int)  # until when messages from one rank to another do
        self.ready: dict[Action, int] = {}  # when a message arrived, a receive was posted, a collective ended
        self.gathered: dict[int, int] = {}

    def do(self, rank: int, action: Action) -> None:
        op, stage = action.op, action.stage
        if op in RECEIVES:
            self.ready[action] = self.now[rank]
        elif op in SENDS:
            self._send(rank, action)
        elif op in COMPUTE:
            start = max(self.now[rank], self.gathered.get(stage, 0), self._arrival(action))
            self._compute(rank, action, start)
        elif op is Op.STEP:
            if self.step or action not in self.first_of_all:
                reduced = [self.ready.get(Action(Op.REDUCE, stage, b), 0) for b in covers(self.schedule, action)]
                self._compute(rank, action, max([self.now[rank], *reduced]))
        elif op is not Op.FREE:
            self._collective(rank, action)

    def end(self) -> None:
        """A rank that does not step waits for its reductions before the pass is over."""
        for rank, actions in enumerate(self.schedule.ranks):
            if self.schedule.buckets and not any(a.op is Op.STEP for a in actions):
                self.now[rank] = max(self.now[rank], self.wire[rank])

    def _arrival(self, action: Action) -> int:
        message = Action(Op.RECV_F if action.op is Op.F else Op.RECV_B, action.stage, action.index)
        return 0 if action.op is Op.W else self.ready.get(message, 0)

    def _compute(self, rank: int, action: Action, start: int) -> None:
        self.now[rank] = start + self.costs.action_ns(self.schedule, action)
        self._span(rank, "compute", "device", action, start, self.now[rank])
        if self.costs.exchange and action.op in BACKWARD | {Op.F}:
            self._exchange(rank, action)

    def _exchange(self, rank: int, action: Action) -> None:
        """Hand over to the rank's own next stage, or back, by way of other ranks; they have a wire for it."""
        to = Action(Op.RECV_F, action.stage + 1, action.index) if action.op is Op.F else \
            Action(Op.RECV_B, action.stage - 1, action.index)
        if not 0 <= to.stage < self.schedule.stages or self.schedule.rank_of[to.stage] != rank:
            return
        boundary = min(action.stage, to.stage)
        took = round(_entry(self.costs.exchange, "exchange", boundary, self.schedule.stages - 1) * 1e9)
        start = max(self.now[rank], self.exchanging[rank])
        self.exchanging[rank] = self.ready[to] = start + took
        self.spans.append(Span(rank, "comm", "wire", f"exchange {self.schedule.name(action)}", start, start + took,
                               step=self.step))

    def _send(self, rank: int, action: Action) -> None:
        receive = action.partner()
        way = rank, self.schedule.rank_of[receive.stage]
        size, latency, transfer = self.costs.message(min(action.stage, receive.stage), self.schedule.stages)
        start = max(self.now[rank], self.way[way])
        stop = max(start + latency, self.ready[receive]) + transfer
        self.way[way] = self.ready[receive] = stop
        self._span(rank, "comm", "wire", action, start, stop, size)

    def _collective(self, rank: int, action: Action) -> None:
        start = max(self.now[rank], self.wire[rank])
        self.wire[rank] = stop = start + self.costs.action_ns(self.schedule, action)
        if action.op is Op.GATHER:
            self.gathered[action.stage] = stop  # of several buckets the last: the wire keeps their order
        else:
            self.ready[action] = stop
        self._span(rank, "comm", "wire", action, start, stop,
                   bucket=action.index if action.op is Op.REDUCE else -1)

    def _span(self, rank: int, kind: str, lane: str, action: Action, start: int, stop: int, size: int = -1,
              bucket: int = -1) -> None:
        self.spans.append(Span(rank, kind, lane, self.schedule.name(action), start, stop, size, bucket, self.step))


def updates(timeline: Timeline) -> list[float]:
    """Seconds by which each step but the first ends later than the one before: its last compute on any rank. Measured
    or predicted. Where steps are carried into the next pass, this is what an update takes, and the length of a step is
    not."""
    ends: dict[int, int] = {}
    for span in timeline.select(kind="compute"):
        ends[span.step] = max(ends.get(span.step, 0), span.stop)
    return [(ends[b] - ends[a]) / 1e9 for a, b in pairwise(sorted(k for k in ends if k >= 0))]


def bubble(timeline: Timeline) -> float:
    """The share of rank-time in which a rank does not compute, of one step of a pipeline, measured or predicted:
    1 − Σ compute / (ranks · T), T from the first compute of any rank to the end of the last compute or
    communication. Raises `ValueError` where nothing is computed."""
    compute = timeline.select(kind="compute")
    if not len(compute):
        raise ValueError("the timeline has no compute, so that it cannot be said how much of it is idle")
    stop = max(s.stop for s in timeline if s.kind in ("compute", "comm"))
    whole = (stop - min(s.start for s in compute)) * len(timeline.ranks)
    busy = sum(length(union(compute.select(rank=rank).intervals())) for rank in compute.ranks)
    return 1 - busy / whole if whole else 0.0


def ideal_bubble(p: int, m: int, v: int = 1) -> float:
    """(p−1)/(v·m+p−1): the bubble of GPipe and 1F1B (v = 1) and of interleaved 1F1B (p divides m) as a share of the
    *step*, with equal stages and free links (Narayanan et al., arXiv 2104.04473, section 2.2, give it as a share of
    the ideal time, (p−1)/(v·m))."""
    return (p - 1) / (v * m + p - 1)
