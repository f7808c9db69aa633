"""Exercise 4.1: assign parameters to buckets.

The learner writes `assign_buckets(sizes_bytes, cap_bytes) -> list[list[int]]`:

- `sizes_bytes` lists `(id, bytes)` in the order in which the model registers its parameters. A tied
  parameter is listed at each of its places, with the same id.
- Gradients become ready in the opposite order. A tied gradient is ready when backward has passed its
  *first* place, the last one it comes to.
- A bucket is closed as soon as it holds `cap_bytes` or more. The last one holds what is left.
- The result lists the buckets in the order in which they become ready, and the ids in each likewise.

The check states these rules; it does not hold a solution.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from course_lib.lab.guard import call
from course_lib.lab.model import Row, Verdict, exercise

Sizes = list[tuple[int, int]]
Buckets = list[list[int]]

HINTS = (
    "Backward starts at the end of the model, so walk the list from its end. Carry two things along: the bucket "
    "that is being filled, and the bytes it holds.",
    "After you add a parameter to the open bucket, ask whether its bytes have reached the cap. If so, put the bucket "
    "into the result and open an empty one. For a tied parameter, ask before adding: is this its first place in the "
    "list? If not, pass on; it comes again.",
    "first = {}; for place, (id, size) in enumerate(sizes_bytes): first.setdefault(id, place). Then go through "
    "reversed(list(enumerate(sizes_bytes))), skip every place that is not first[id], append the id, add its size, "
    "close the bucket at cap_bytes. After the loop, append the open bucket if it is not empty.",
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end?",
    "forward_order": "Your buckets are filled from the first layer on. Backward reaches the first layer last, so such "
    "a bucket is not complete until backward is almost over: full, but not arrived. Walk the list from its end.",
    "tied_twice": "A tied parameter is in your buckets twice. It has one gradient, and that would be sent, and summed, "
    "two times. Put each id into one bucket only.",
    "tied_too_early": "You place a tied parameter where backward meets it first. Its gradient is not complete there: "
    "the other use still adds to it. It is ready at the place listed first, which backward comes to last.",
    "counts_elements": "Your buckets close as if the cap counted elements. Both the sizes and the cap are bytes: add "
    "the sizes as they are.",
    "stays_under_cap": "You close a bucket before it would grow past the cap. Here a bucket is closed once it holds at "
    "least the cap, so the parameter that reaches it is still part of it.",
    "closes_above_cap": "A bucket that holds exactly the cap is closed too. Yours stays open until it holds more.",
    "drops_the_last": "Parameters are missing at the end. After the loop the open bucket is usually not empty, and its "
    "gradients must be sent as well.",
}


class Case(NamedTuple):
    """One call, and what came back."""

    sizes: Sizes
    cap: int
    got: Buckets

    def __str__(self) -> str:
        return f"{_shown(self.sizes, self.cap)} gave {self.got}"

    def ready(self) -> list[int]:
        """The ids in the order in which their gradients become ready."""
        first: dict[int, int] = {}
        for place, (index, _) in enumerate(self.sizes):
            first.setdefault(index, place)
        return sorted(first, key=lambda index: -first[index])

    def flat(self) -> list[int]:
        return [index for bucket in self.got for index in bucket]

    def held(self, bucket: list[int]) -> list[int]:
        """The running number of bytes in a bucket, parameter by parameter."""
        size, total = dict(self.sizes), 0
        return [total := total + size.get(index, 0) for index in bucket]

    def tied(self) -> bool:
        return len(dict(self.sizes)) < len(self.sizes)


@exercise(
    "4.1",
    title="assign parameters to buckets",
    minutes=10,
    needs="assign_buckets",
    hints=HINTS,
    mistakes=MISTAKES,
)
def assign_buckets(answer: Callable[[Sizes, int], Buckets], draw: random.Random) -> Verdict:
    """Rows for a worked example and for some fifty small models drawn by chance."""
    example = [(0, 8), (1, 4), (2, 12), (3, 4)]
    drawn = [_model(draw, tied) for tied in (False, True) for _ in range(25)]
    models = [(example, 12), ([], 8), ([(0, 40)], 8), *drawn]
    cases = []
    for sizes, cap in models:
        given = list(sizes)
        got = call(answer, given, cap, shown=_shown(sizes, cap))
        if fault := _shape_fault(got, given, sizes):
            return Verdict((Row(fault[0], False, fault[1], f"{_shown(sizes, cap)} gave {got!r}"),), fault[2])
        cases.append(Case(list(sizes), cap, [[int(index) for index in bucket] for bucket in got]))
    plain, tied = [c for c in cases if not c.tied()], [c for c in cases if c.tied()]
    rows = (
        Row("the example of the text", cases[0].got == [[3, 2], [1, 0]], "[[3, 2], [1, 0]]", str(cases[0])),
        _row("each parameter is in one bucket", "every id once, none left out", cases,
             lambda c: sorted(c.flat()) == sorted(c.ready())),
        _row("ready first, sent first", "ids from the end of the list to its beginning", plain,
             lambda c: _relative(c.flat(), c.ready())),
        _row("a tied parameter waits for its first place", "its id stands where it is listed first", tied,
             lambda c: _relative(list(dict.fromkeys(c.flat())), c.ready())),
        _row("a bucket closes at the cap", "every bucket but the last holds the cap or more",
             cases, lambda c: all(c.held(b)[-1:] >= [c.cap] for b in c.got[:-1])),
        _row("a bucket takes nothing after that", "less than the cap before its last parameter",
             cases, lambda c: all(before < c.cap for b in c.got for before in c.held(b)[:-1])),
        _row("no empty bucket", "no parameters, no bucket", cases, lambda c: all(c.got)),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(cases, plain, tied))


def _mistake(cases: list[Case], plain: list[Case], tied: list[Case]) -> str:
    """The mistake that explains what all cases show; the plainest one first."""
    if all(_forward(c) or c.flat() == c.ready() for c in plain) and any(_forward(c) for c in plain):
        return "forward_order"
    if any(len(c.flat()) > len(set(c.flat())) for c in tied):
        return "tied_twice"
    if any(c.flat() != c.ready() and c.flat() == c.ready()[: len(c.flat())] for c in cases):
        return "drops_the_last"
    if all(c.flat() == _met_first(c) for c in cases) and any(c.flat() != c.ready() for c in tied):
        return "tied_too_early"
    if all(_closes(c, c.cap * 4) for c in cases):
        return "counts_elements"
    if all(_closes(c, c.cap + 1) for c in cases):
        return "closes_above_cap"
    if all(_stays_under(c) for c in cases):
        return "stays_under_cap"
    return ""


def _closes(case: Case, cap: int) -> bool:
    """Whether the buckets follow the rule for this cap."""
    totals = [case.held(bucket) for bucket in case.got if bucket]
    return all(t[-1] >= cap for t in totals[:-1]) and all(before < cap for t in totals for before in t[:-1])


def _forward(case: Case) -> bool:
    """Whether all ids, or those of one bucket, stand in the order of registration."""
    runs = [run for run in (case.flat(), *case.got) if len(run) > 1]
    return any(run == _relative_order(run, case.ready())[::-1] for run in runs)


def _stays_under(case: Case) -> bool:
    """Whether each bucket was closed because the next parameter would have taken it past the cap."""
    totals = [case.held(bucket) for bucket in case.got if bucket]
    within = all(len(t) == 1 or t[-1] <= case.cap for t in totals)
    return within and all(t[-1] + after[0] > case.cap for t, after in pairwise(totals))


def _relative_order(ids: Sequence[int], order: list[int]) -> list[int]:
    return [index for index in order if index in ids]


def _relative(ids: list[int], order: list[int]) -> bool:
    """Whether the ids that are there stand in this order."""
    return [index for index in ids if index in order] == _relative_order(ids, order)


def _met_first(case: Case) -> list[int]:
    """The order in which backward meets each id for the first time."""
    return list(dict.fromkeys(index for index, _ in reversed(case.sizes)))


def _row(name: str, expected: str, cases: list[Case], holds: Callable[[Case], bool]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: len(c.sizes))
    seen = str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} models"
    return Row(name, not broken, expected, seen)


def _shape_fault(got: object, given: Sizes, sizes: Sizes) -> tuple[str, str, str] | None:
    """What is wrong with the form of an answer: row, expectation, mistake."""
    if got is None:
        return "returns the buckets", "a list of lists of ids", "no_result"
    try:
        whole = all(int(index) == index for bucket in got for index in bucket)  # type: ignore[attr-defined]
        listed = all(isinstance(part, list | tuple) for part in (got, *got))
    except (TypeError, ValueError, OverflowError):
        whole = listed = False
    if not (whole and listed):
        return "returns a list of lists of ids", "for instance [[3, 2], [1, 0]]", ""
    if given != sizes:
        return "leaves the list it was given as it was", "sizes_bytes unchanged after the call", ""
    return None


def _model(draw: random.Random, tied: bool) -> tuple[Sizes, int]:
    """A small model: sizes that often add up to the cap exactly, ids in no telling order, ties at a distance."""
    count = draw.randint(4, 9)
    ids = draw.sample(range(20), count)
    sizes = [(index, 4 * draw.randint(1, 5)) for index in ids]
    if tied:
        sizes.insert(draw.randint(count - 1, count), sizes[draw.randint(0, 1)])
    return sizes, 4 * draw.randint(2, 6)


def _shown(sizes: Sizes, cap: int) -> str:
    return f"assign_buckets({sizes}, {cap})"
