"""The schedules that have names. Each gives compute only; `messages` adds sends and receives.

p is the number of ranks, m of micro-batches, v of stages a rank. In the looped placement rank r holds stages
r, r + p, r + 2p, …; in the V placement stages r and 2p − 1 − r.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from course_lib.schedule.action import Action, Op, Schedule, ScheduleError


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., arXiv 1811.06965). Keeps the activations of m micro-batches.
    Bubble (p−1)/(m+p−1) of the step."""
    _refuse(p, m)
    return Schedule.of(([*_each(Op.F, r, m), *_each(Op.B, r, m)] for r in range(p)), micro_batches=m)


def one_f_one_b(p: int, m: int) -> Schedule:
    """1F1B (PipeDream-Flush, arXiv 2006.09503): p−1−r forwards to warm up, then one forward and one backward in turn,
    then the backwards that are left. The bubble is GPipe's; at most p−r activations are kept."""
    _refuse(p, m)
    return Schedule.of((_merged(min(p - 1 - r, m), _each(Op.F, r, m), _each(Op.B, r, m)) for r in range(p)),
                       micro_batches=m)


def interleaved(p: int, m: int, v: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., arXiv 2104.04473) for any m. Micro-batches travel in rounds of about p: a
    rank takes a round through its first stage, then through its second, and so on. Where p divides m the rounds
    are p long and the bubble is (p−1)/(v·m+p−1) of the step; else the first rounds are longer by one or more."""
    _refuse(p, m, v)
    forward, backward = _looped(p, m, v)
    ahead = (v - 1) * max(_rounds(p, m))
    return Schedule.of((_merged(min(ahead + 2 * (p - 1 - r), v * m), forward(r), backward(r, Op.B)) for r in range(p)),
                       [s % p for s in range(p * v)], m)


def breadth_first(p: int, m: int, v: int = 1) -> Schedule:
    """Every rank takes all micro-batches through its first stage, then all through its second, and so on, and back in
    the same way (Lamy-Poirier, arXiv 2211.05953). A stage is in use once in each direction, which leaves what it sends
    the most to travel under; activations of v·m are kept. With v = 1 it is GPipe."""
    _refuse(p, m, v)
    return Schedule.of(([*(Action(Op.F, r + p * chunk, i) for chunk in range(v) for i in range(m)),
                         *(Action(Op.B, r + p * chunk, i) for chunk in reversed(range(v)) for i in range(m))]
                        for r in range(p)), [s % p for s in range(p * v)], m)


def zero_bubble(p: int, m: int, v: int = 1) -> Schedule:
    """ZB-H1 (Qi et al., arXiv 2401.10241): as interleaved 1F1B, but the backward is split, the stage before waits for
    I only, and W is done r backwards later, where the cool-down has room. Keeps no more activations than 1F1B."""
    _refuse(p, m, v)
    forward, backward = _looped(p, m, v)
    ahead = (v - 1) * max(_rounds(p, m))
    ranks = []
    for r in range(p):
        warm = min(ahead + p - 1 - r, v * m)
        weights, actions, backwards = iter(backward(r, Op.W)), [], 0
        for action in _merged(warm, forward(r), backward(r, Op.I)):
            actions.append(action)
            backwards += action.op is Op.I
            if action.op is Op.I and backwards > r:
                actions.append(next(weights))
        ranks.append([*actions, *weights])
    return Schedule.of(ranks, [s % p for s in range(p * v)], m)


def zb_v(p: int, m: int) -> Schedule:
    """ZB-V (arXiv 2401.10241, section 6): two stages a rank in a V, so that the first rank also has the last stage.
    No rank is idle between its first and last action where F, I and W take equally long and m ≥ 2p − 1."""
    _refuse(p, m)
    return Schedule.of(([a for a in _v_shaped(p, max(m, 2 * p - 1), r) if a.index < m] for r in range(p)),
                       [*range(p), *reversed(range(p))], m)


def _v_shaped(p: int, m: int, r: int) -> Iterator[Action]:
    """The actions of rank r for at least 2p − 1 micro-batches."""
    down, up = r, 2 * p - 1 - r
    done = {(op, s): 0 for op in (Op.F, Op.I, Op.W) for s in (down, up)}

    def do(op: Op, stage: int) -> Action:
        done[op, stage] += 1
        return Action(op, stage, done[op, stage] - 1)

    def backward(stage: int) -> Iterator[Action]:
        yield do(Op.I, stage)
        yield do(Op.W, stage)

    for _ in range(2 * (p - r) - 1):
        yield do(Op.F, down)
    for _ in range(r):
        yield do(Op.F, up)
        yield do(Op.F, down)
    for _ in range(p - r):
        yield do(Op.F, up)
        yield from backward(up)
    while done[Op.F, up] < m:
        if done[Op.F, down] < m:
            yield do(Op.F, down)
        yield from backward(down)
        yield do(Op.F, up)
        yield from backward(up)
    for _ in range(r):
        yield do(Op.I, down)
        yield do(Op.I, up)
    for _ in range(p - r):
        yield from backward(down)
    for stage in (up, down):
        while done[Op.W, stage] < m:
            yield do(Op.W, stage)


def _refuse(p: int, m: int, v: int = 1) -> None:
    if min(p, m, v) < 1:
        raise ScheduleError(f"p={p} ranks, m={m} micro-batches, v={v} stages a rank: each must be at least 1")


def _each(op: Op, stage: int, m: int) -> list[Action]:
    return [Action(op, stage, i) for i in range(m)]


def _merged(warm: int, forward: list[Action], backward: list[Action]) -> list[Action]:
    """`warm` forwards, then a forward and a backward in turn, then the backwards that are left."""
    steady = [a for pair in zip(forward[warm:], backward) for a in pair]
    return [*forward[:warm], *steady, *backward[len(forward) - warm:]]


def _rounds(p: int, m: int) -> list[int]:
    """m micro-batches in ⌊m/p⌋ rounds (at least one) that are as even as can be, the longer ones first."""
    rounds = max(1, m // p)
    return [m // rounds + (i < m % rounds) for i in range(rounds)]


def _looped(p: int, m: int, v: int) -> tuple[Callable[[int], list[Action]], Callable[[int, Op], list[Action]]]:
    """Forward and backward order of a rank: round by round, in each through all of its stages."""
    starts, start = [], 0
    for size in _rounds(p, m):
        starts.append(range(start, start + size))
        start += size

    def forward(r: int) -> list[Action]:
        return [Action(Op.F, r + p * chunk, i) for micro in starts for chunk in range(v) for i in micro]

    def backward(r: int, op: Op) -> list[Action]:
        return [Action(op, r + p * chunk, i) for micro in starts for chunk in reversed(range(v)) for i in micro]

    return forward, backward
