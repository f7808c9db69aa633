"""Exercise 4.5 (challenge): the best plan.

The learner writes `best_plan(sizes_bytes, ready_s, a_s, beta_s_per_byte) -> list[int]`:

- `sizes_bytes[i]` and `ready_s[i]` describe gradient i, in the order in which the gradients become ready:
  its bytes, and the second at which it is complete.
- A plan cuts this list into buckets of neighbours. The result says how many gradients each bucket holds,
  first bucket first.
- A bucket of S bytes occupies the wire for a_s + beta_s_per_byte·S. It starts when its last gradient is
  ready and the wire is free: f = max(f of the bucket before, ready) + a + β·S.
- The best plan is one whose last bucket finishes soonest. Where several do, any of them is right.

Up to ten gradients every plan is tried here; longer lists are compared with `course_lib.simulate`. They
have far too many plans to try.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from course_lib.lab.exercises.lab04.plan_cases import Case, best_finish, drawn, shown
from course_lib.lab.guard import Broke, TookTooLong, call, time_limit
from course_lib.lab.model import Row, Verdict, exercise

LONG = ((30, 1.0), (60, 3.0), (120, 6.0))
"""Gradients, and seconds for their plan. Without trying all plans, the first takes a few milliseconds."""
SECONDS_SHORT = 8.0

HINTS = (
    "Look at the last bucket of the best plan for the first j gradients. It holds the gradients i to j−1 for some i. "
    "What comes before it is a plan for the first i gradients; only the one of those that finishes soonest matters.",
    "Let soonest[j] be the earliest finish of any plan for the first j gradients, soonest[0] = 0. For each j try every "
    "i < j: the last bucket starts at max(soonest[i], ready_s[j−1]) and takes a + β·(bytes of i to j−1). Keep the "
    "smallest, and note its i. At the end walk back from n along the noted i.",
    "for j in range(1, n + 1): finish = {i: max(soonest[i], ready_s[j - 1]) + a_s + beta_s_per_byte * "
    "sum(sizes_bytes[i:j]) for i in range(j)}; cut[j] = min(finish, key=finish.get); soonest[j] = finish[cut[j]]. "
    "Then: j = n; while j: put j - cut[j] in front of the plan; j = cut[j].",
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end?",
    "returns_the_time": "Your function returns when the plan finishes. The plan itself is wanted: how many gradients "
    "each bucket holds.",
    "cuts_for_lengths": "Your numbers are places at which the list is cut. Lengths are wanted: how many gradients each "
    "bucket holds, so that together they are all.",
    "turned_around": "Read from its end, your plan would be the best. Walking back finds the last bucket first: turn "
    "the list around before you return it.",
    "one_bucket": "You always make one bucket. It can leave only when the last gradient is ready, so nothing is "
    "hidden. That is the best plan where ready times do not matter: does your recursion use them?",
    "sum_of_finishes": "Your plans have the smallest sum of finish times, not the earliest last finish. Nobody waits "
    "for the buckets in between: the first may finish later if that brings the last forward.",
    "ignores_latency": "Your plans would be the best if a were 0. Every bucket pays a once, so two buckets that could "
    "travel together cost one a too much.",
    "forgets_busy": "You make as many buckets as there are gradients. The wire carries one bucket at a time: a bucket "
    "starts at max(finish of the one before, ready), not as soon as it is ready.",
    "starts_too_early": "Your plans would be the best if a bucket could start with its first gradient. It is full, and "
    "starts, when its last one is ready: ready_s[j − 1] for the gradients i to j − 1.",
    "equal_buckets": "Your buckets are all of one size. Where the wire is slower than backward, a small first bucket "
    "starts it early and large ones later save latency. Where it is faster, only the last bucket is exposed, and that "
    "should be small. A fixed size can do neither.",
    "exponential": "Your plans are the best, but you try too many of them: n gradients have 2ⁿ⁻¹ plans. The soonest "
    "finish of the first i gradients does not depend on what follows. Compute it once for each i and keep it.",
}


@exercise("4.5", title="the best plan", minutes=25, needs="best_plan", hints=HINTS, mistakes=MISTAKES)
def best_plan(answer: Callable[..., list[int]], draw: random.Random) -> Verdict:
    """Rows for the example, some thirty short lists against all their plans, and some long ones against the library."""
    inputs = [([1, 1, 2], [1.0, 2.0, 3.0], 1.0, 1.0), ([5], [2.0], 1.0, 0.5)]
    inputs += [drawn(draw, count) for count in (*(draw.randint(3, 8) for _ in range(26)), 10, 10)]
    try:
        with time_limit(SECONDS_SHORT):
            got = [_called(answer, *given) for given in inputs]
    except TookTooLong:
        seen = f"still running after {SECONDS_SHORT:.0f} s, with ten gradients at most"
        return Verdict((Row("your code comes to an end", False, "an answer for thirty short lists", seen),))
    if fault := _shape_fault(inputs, got):
        return fault
    cases = [Case(*given, plan) for given, plan in zip(inputs, got)]
    wrong = sorted((c for c in cases if not c.least(c.got, c.last)), key=lambda c: len(c.sizes))
    seen = str(wrong[0]) if wrong else f"held for {len(cases)} of {len(cases)} lists, against all their plans"
    rows = (
        Row("the example of the text", cases[0] not in wrong, "[1, 2], which finishes at 7 s",
            str(cases[0]) if cases[0] in wrong else str(cases[0].got)),
        Row("the last bucket finishes as soon as it can", not wrong, "no plan finishes earlier", seen),
    )  # fmt: skip
    if wrong:
        return Verdict(rows, _mistake(answer, cases))
    row, mistake = _long(answer, draw)
    return Verdict((*rows, row), mistake)


def _mistake(answer: Callable, cases: list[Case]) -> str:
    """The mistake that explains all plans; the plainest one first."""
    if all(c.least(c.got[::-1], c.last) for c in cases):
        return "turned_around"
    if all(len(c.got) == 1 for c in cases):
        if _works_without(answer, cases[0], 1):
            return "one_bucket"
        return "starts_too_early" if _cuts_for_a_bonus(answer) else "sum_of_finishes"
    if all(len(c.got) == len(c.sizes) for c in cases):
        return "ignores_latency" if _works_without(answer, cases[0], 2) else "forgets_busy"
    if all(c.least(c.got, lambda plan, c=c: c.finish(plan, a=0.0)[-1]) for c in cases):
        return "ignores_latency"
    if all(c.least(c.got, lambda plan, c=c: sum(n * f for n, f in zip(plan, c.finish(plan)))) for c in cases):
        return "sum_of_finishes"
    if all(c.uniform() for c in cases):
        return "equal_buckets"
    return ""


def _works_without(answer: Callable, case: Case, place: int) -> bool:
    """Whether the answer comes out even when one argument is None: then it does not use it."""
    arguments: list[Any] = [list(case.sizes), list(case.ready), case.a, case.beta]
    arguments[place] = None
    return _probed(answer, *arguments) is not None


def _cuts_for_a_bonus(answer: Callable) -> bool:
    """Whether one bucket is just the cheapest: if a bucket is paid for (a < 0), the last of many ends earlier, but
    their finishes still add up to more."""
    return _probed(answer, [1] * 4, [1.0] * 4, -(2.0**-10), 1.0) == [1] * 4


def _probed(answer: Callable, *arguments: Any) -> Any:
    try:
        with time_limit(1.0):
            return call(answer, *arguments, shown="")
    except (Broke, TookTooLong):
        return None


def _long(answer: Callable, draw: random.Random) -> tuple[Row, str]:
    """Lists that have too many plans to try, against the library."""
    for count, seconds in LONG:
        given = drawn(draw, count)
        name, expected = f"also for {count} gradients", f"within {seconds:g} s"
        try:
            with time_limit(seconds):
                got = _called(answer, *given)
        except TookTooLong:
            seen = f"still running after {seconds:g} s; {count} gradients have {2 ** (count - 1):.1e} plans"
            return Row(name, False, expected, seen), "exponential"
        if fault := _shape_fault([given], [got]):
            return fault.rows[0], ""
        finish, best = Case(*given, got).last(got), best_finish(*given)
        if finish > best * (1 + 1e-9):
            return Row(name, False, f"a plan that finishes at {best:.6g} s", f"{got} finishes at {finish:.6g} s"), ""
    counts = ", ".join(str(count) for count, _ in LONG)
    return Row("also for long lists", True, "the same finish as the library", f"held for {counts} gradients"), ""


def _called(answer: Callable, sizes: list[int], ready: list[float], a: float, beta: float) -> Any:
    return call(answer, list(sizes), list(ready), a, beta, shown=shown(sizes, ready, a, beta))


def _shape_fault(inputs: list[tuple], got: list[Any]) -> Verdict | None:
    """What is wrong with the form of the answers. Right ones become lists of `int` in place."""
    for number, (given, plan) in enumerate(zip(inputs, got)):
        seen, count = f"{shown(*given)} gave {plan!r}", len(given[0])
        if plan is None or isinstance(plan, int | float):
            mistake = "no_result" if plan is None else "returns_the_time"
            return Verdict((Row("returns the lengths of the buckets", False, "for instance [1, 2]", seen),), mistake)
        try:
            got[number] = [int(length) for length in plan]
            whole = all(int(length) == length for length in plan)
        except (TypeError, ValueError, OverflowError):
            whole = False
        if not whole:
            return Verdict((Row("returns the lengths of the buckets", False, "for instance [1, 2]", seen),))
        if sum(got[number]) != count or min(got[number]) < 1:
            expected = f"lengths of 1 or more that add up to {count}"
            row = Row("each gradient is in one bucket", False, expected, seen)
            return Verdict((row,), "cuts_for_lengths" if _are_cuts(inputs, got) else "")
    return None


def _are_cuts(inputs: list[tuple], got: list[Any]) -> bool:
    """Whether all answers, read as places in the list, are the best plans."""
    try:
        places = [sorted({0, *map(int, cuts), len(given[0])}) for given, cuts in zip(inputs, got)]
    except (TypeError, ValueError):
        return False
    cases = [Case(*given, [b - a for a, b in pairwise(cuts)]) for given, cuts in zip(inputs, places)]
    return all(sum(c.got) == len(c.sizes) and c.last(c.got) <= best_finish(*c[:4]) * (1 + 1e-9) for c in cases)
