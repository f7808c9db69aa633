"""Look for a better placement: a greedy start, then local search over schedules that can run, with a bound to stop at.

A move takes one W, reduction, step (with the gather behind it) or gather to another place of its rank's list, or across
its end. What `check` refuses, or what keeps more activations than allowed, is never taken.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from course_lib.schedule.action import COMPUTE, Action, Op, Schedule, ScheduleError
from course_lib.schedule.check import check
from course_lib.simulate.bound import Bound, bound
from course_lib.simulate.greedy import greedy
from course_lib.simulate.pipeline import Costs, period
from course_lib.simulate.place import joint

MOVES = frozenset({Op.W, Op.REDUCE, Op.STEP, Op.GATHER})


@dataclass(frozen=True)
class Found:
    """The best schedule, seconds of an update with it and with the one it began with, and the bound of both. `tried`
    moves were looked at, of which `valid` could run. `steps` are (move, seconds) of each improvement; move 0 is a
    better begin."""

    schedule: Schedule
    period_s: float
    start_s: float
    bound: Bound
    tried: int
    valid: int
    steps: tuple[tuple[int, float], ...]

    @property
    def gap(self) -> float:
        """How far above the bound, as a share of it. 0: nothing is faster. What is left may be out of reach, too."""
        return self.period_s / self.bound.seconds - 1


def search(schedule: Schedule, costs: Costs, *, moves: int = 600, seed: int = 0, memory: int | None = None) -> Found:
    """Begin with `schedule`, or with what `greedy` or `joint` make of its stages where that is better, try `moves`
    random moves, and keep each that is not worse, until the bound is reached. No rank keeps more than `memory`
    activations (micro-batches times stages; by default as many as the most that a rank keeps now), nor more stages
    gathered than now. The same seed finds the same. Raises `ScheduleError` for a schedule that cannot run or keeps too
    much to begin with."""
    facts = check(schedule)
    memory = max(facts.peak_activations) if memory is None else memory
    if max(facts.peak_activations) > memory:
        raise ScheduleError(f"the schedule keeps {max(facts.peak_activations)} activations on a rank to begin with, "
                            f"more than memory={memory}; begin with one that keeps less")
    draw, least = random.Random(seed), bound(schedule, costs)
    best, now, steps, tried, valid = schedule, period(schedule, costs), [], 0, 0
    start = now
    for made in _starts(schedule, costs, memory, max(facts.peak_gathered)):
        if (took := period(made, costs)) < now:
            best, now, steps = made, took, [(0, took)]
    while tried < moves and now > least.seconds:
        tried += 1
        other = _moved(best, draw)
        try:
            if other == best or not _fits(other, memory, max(facts.peak_gathered)):
                continue
            took = period(other, costs)
        except ScheduleError:
            continue
        valid += 1
        if took <= now:
            if took < now:
                steps.append((tried, took))
            best, now = other, took
    return Found(best, now, start, least, tried, valid, tuple(steps))


def _fits(schedule: Schedule, memory: int, gathered: int) -> bool:
    facts = check(schedule)
    return max(facts.peak_activations) <= memory and max(facts.peak_gathered) <= gathered


def _starts(schedule: Schedule, costs: Costs, memory: int, gathered: int) -> Iterator[Schedule]:
    """What `greedy` and the passes of `joint` make of the same stages, where it can run with as little memory."""
    bare = schedule.with_ranks([[a for a in actions if a.op in COMPUTE] for actions in schedule.ranks], buckets=())
    for make in (greedy, joint):
        try:
            made = make(bare, costs, schedule.buckets, memory)
            if _fits(made, memory, gathered):
                yield made
        except ScheduleError:
            continue


def _moved(schedule: Schedule, draw: random.Random) -> Schedule:
    """One action, or the buckets' steps and gathers that follow each other, taken elsewhere on its rank."""
    rank = draw.randrange(len(schedule.ranks))
    actions = list(schedule.ranks[rank])
    places = [k for k, a in enumerate(actions) if a.op in MOVES]
    if not places:
        return schedule
    k = draw.choice(places)
    size = 1
    if actions[k].op in (Op.STEP, Op.GATHER) and draw.random() < 0.8:
        while k + size < len(actions) and _goes_with(actions[k + size - 1], actions[k + size]):
            size += 1
    taken = actions[k:k + size]
    del actions[k:k + size]
    far = draw.choice((1, 2, 3, 5, 8, 13))
    place = (k + draw.choice((-far, far))) % (len(actions) + 1)
    actions[place:place] = taken
    return schedule.with_ranks(actions if r == rank else old for r, old in enumerate(schedule.ranks))


def _goes_with(one: Action, after: Action) -> bool:
    """A step and the gather of the same bucket."""
    return one.op is Op.STEP and after.op is Op.GATHER and (one.stage, one.index) == (after.stage, after.index)
