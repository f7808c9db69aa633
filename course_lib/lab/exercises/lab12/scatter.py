"""Exercise 12.2: reduce-scatter the buckets under backward, in every micro-step (ZeRO stage 2).

The learner writes three methods; the cell of the exercise gives the rest:

    class ScatterBuckets:
        def __init__(self, sizes, wire):
            self.sizes = list(sizes)        # elements of each bucket's gradient
            self.wire = wire                # wire.rank, wire.ranks, wire.reduce_scatter(part, whole) -> handle
            self.flying = []                # what is on its way
            self.sums = {}                  # this rank's part of the window's gradient, by bucket

        def bucket_full(self, b, gradient): ...  # in backward, in any order of b; of this micro-step alone, 1-D
        def end_of_backward(self): ...           # after each micro-step
        def finish(self): ...                    # after the window: the mean over ranks of this rank's part, by bucket

Rank r's part of a bucket are its elements r·k to (r+1)·k with k = ⌈size/n⌉, so the last parts may be shorter, or empty.
Gradients are drawn so that every element has a value of its own, and every micro-step a digit of its own: what was
counted, and how often, can be read off the result.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from course_lib.lab.exercises.lab12.windows import Window, windows
from course_lib.lab.guard import Broke
from course_lib.lab.model import Row, Verdict, exercise

HINTS = (
    "Three moments. In backward: hand a bucket over, and go on. After backward: take in what has arrived, and let go "
    "of the rest. After the window: divide, and cut off what does not belong to the bucket. Nothing else keeps a "
    "gradient.",
    "The wire wants n equal parts. k = ⌈size/n⌉ elements a part, zeros *behind* the gradient up to n·k, and an empty "
    "tensor of k elements for what arrives. After the wait, add it to this bucket's sum. The part's true length on "
    "rank r is size − r·k, but not below 0 and not above k.",
    "bucket_full: k = -(-self.sizes[b] // n); whole = torch.cat([gradient, gradient.new_zeros(n * k - self.sizes[b])])"
    "; part = gradient.new_empty(k); self.flying.append((b, part, self.wire.reduce_scatter(part, whole))). "
    "end_of_backward: for each: wait; self.sums[b] = self.sums.get(b, 0) + part. Then self.flying = []. finish: "
    "[self.sums[b][:max(0, size - r * k)] / n for each bucket], and self.sums = {}.",
)

MISTAKES = {
    "does_not_pad": "The wire takes n equal parts. Where n does not divide the bucket, fill it up with zeros at its "
    "end, to n·⌈size/n⌉ elements.",
    "truncates": "The last elements of a bucket never travel: ⌊size/n⌋ elements a part leave a remainder. Round up, "
    "and fill up with zeros.",
    "pads_in_front": "Your zeros stand before the gradient, so every rank gets the part of another place. Its elements "
    "are right, and they belong to other parameters. Put the zeros at the end.",
    "returns_the_padding": "On the last ranks your part is longer than what belongs to it: the zeros that filled up "
    "the bucket are still there. Cut it to its true length, which may be 0.",
    "averages_twice": "Your result is too small by the number of ranks. You divide before sending and again at the "
    "end. Once is enough.",
    "never_divides": "Your result is the sum over the ranks. The mean is wanted: divide by `self.wire.ranks`.",
    "divides_by_micro_steps": "You divide by the number of micro-steps too. The loss of each micro-step is divided by "
    "N already; their gradients add up.",
    "waits_in_backward": "You wait for a bucket in the call that sends it. Backward stands still until it has arrived. "
    "Wait in end_of_backward, or when the next bucket comes.",
    "sent_late": "Buckets leave when backward is over, so nothing of them hides. Send each in bucket_full.",
    "reads_too_early": "What you add up has not arrived: until its wait() a part holds nothing of use.",
    "changes_in_flight": "You change a bucket that is on its way. It belongs to the wire until its wait().",
    "keeps_the_whole": "The result is right, and the memory is not: after end_of_backward whole gradients are still "
    "referred to. Then every rank holds all of it, as without ZeRO. Keep the parts, and let go of what was sent.",
    "by_place": "Your parts stand in the order in which the buckets came. Backward fills them in an order of its own, "
    "often the last one first: `b` says which one it is.",
    "keeps_the_last": "Your result holds the last micro-step only. Add each one's part to the sum.",
    "counts_again": "Micro-steps are counted more than once. What end_of_backward has added is still in your list when "
    "the next one ends: empty it.",
    "keeps_the_sum": "The first window is right, the second begins with what the first left behind. Empty the sums in "
    "finish.",
}


@exercise("12.2", title="reduce-scatter under backward", minutes=12, needs="ScatterBuckets", hints=HINTS,
          mistakes=MISTAKES, kind="class")  # fmt: skip
def scatter_the_buckets(answer: type, draw: random.Random) -> Verdict:
    """Rows over some ten trainings of two windows each; the wire's misuse is a row as well."""
    for name in ("bucket_full", "end_of_backward", "finish"):
        if not callable(getattr(answer, name, None)):
            raise Broke(f"the class has no method `{name}`")
    shapes = [(2, 1, (4,)), (2, 3, (6, 4)), (2, 1, (4, 2, 6, 8)), (3, 2, (3, 9, 6)), (2, 3, (5, 3)), (3, 1, (7, 5)),
              (4, 2, (5, 9, 2)), (1, 3, (4, 3)), (3, 2, (1, 8))]  # fmt: skip
    shapes += [(draw.choice((2, 3, 5)), draw.choice((1, 4)), tuple(draw.randint(1, 11) for _ in range(3)))]
    seen = [window for n, N, sizes in shapes for window in windows(answer, n, N, sizes, draw)]
    first = [w for w in seen if w.number == 0]
    even, uneven = ([w for w in first if w.even == flag] for flag in (True, False))
    rows = (
        _row("the wire is given n equal parts", "whole is n times as long as part", first, lambda w: not w.misfit),
        _row("each bucket leaves in its call", "one reduce-scatter a bucket and micro-step", first, Window.prompt),
        _row("backward never waits for what it sends", "no wait in the same call", first, lambda w: not w.waited),
        _row("what is on its way is left alone", "changed after its wait()", first, lambda w: not w.changed),
        _row("the mean of this rank's part", "buckets that n divides", even, Window.right),
        _row("sizes that n does not divide", "rank r has elements r·k to (r+1)·k", uneven, Window.right),
        _row("nothing whole is left after backward", "memory of the parts alone", first, lambda w: not w.kept),
        _row("the next window works like the first", "the same again", [w for w in seen if w.number], Window.right),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(seen, even, uneven))


def _mistake(seen: list[Window], even: list[Window], uneven: list[Window]) -> str:
    """The mistake that explains what is seen; the plainest one first, and even sizes before the others."""
    first = [w for w in seen if w.number == 0]
    if any(w.late for w in even):
        return "sent_late"
    if any(w.waited for w in even):
        return "waits_in_backward"
    if any(w.changed for w in even):
        return "changes_in_flight"
    if any(w.unread() for w in even):
        return "reads_too_early"
    several = [w for w in even if w.ranks > 1]
    if any(not w.right() for w in several) and all(w.right() or w.by_place() for w in several):
        return "by_place"
    if not all(w.right() for w in several):
        ways = {"never_divides": lambda w: w.holds(w.ranks), "averages_twice": lambda w: w.holds(1 / w.ranks),
                "divides_by_micro_steps": lambda w: w.holds(1 / w.N),
                "keeps_the_last": lambda w: w.counts == [0] * (w.N - 1) + [1],
                "counts_again": lambda w: w.counts == list(range(w.N, 0, -1))}  # fmt: skip
        return next((name for name, holds in ways.items() if all(holds(w) for w in several)), "")
    if any(w.misfit for w in uneven):
        return "does_not_pad"
    if any(w.short for w in uneven):
        return "truncates"
    if not all(w.right() for w in uneven):
        if all(w.right(without_padding=True) for w in uneven):
            return "returns_the_padding"
        return "pads_in_front" if all(w.shifted() for w in uneven) else ""
    if any(w.kept for w in first):
        return "keeps_the_whole"
    return "keeps_the_sum" if any(not w.right() for w in seen if w.number) else ""


def _row(name: str, expected: str, cases: list[Window], holds: Callable[[Window], bool]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: (c.ranks, c.N, len(c.sizes)))
    seen = str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} windows"
    return Row(name, not broken, expected, seen)
