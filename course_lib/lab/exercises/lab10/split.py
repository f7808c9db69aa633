"""Exercise 10.3: split the backward.

The learner writes `split_backward(words, delay)`: from what one rank does under 1F1B (with sends, receives, `reduce0`),
the same with each B in two halves.

- B of micro-batch i becomes I, at its place. A send of its gradient follows I at once, as it followed B.
- W of micro-batch i comes when `delay` further backwards (I) are done and their gradients are sent; what is left at the
  end comes before `reduce0`. All else stays as it is.

What comes back is judged by what it does: complete, no W between an I and its send, at no time more than `delay` + 1
halves left to do, none done sooner than it must, and the reduction last.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from course_lib.lab.guard import call
from course_lib.lab.model import Row, Verdict, exercise
from course_lib.lab.workbench.pipeline_words import is_words, words_of
from course_lib.schedule.generators import one_f_one_b
from course_lib.schedule.messages import with_messages
from course_lib.schedule.passes import add_reductions

HINTS = (
    "Walk through the words once. A B leaves an I behind, and a W that waits. When is the oldest W that waits due, "
    "and what has to be out of the house before it?",
    "Keep a list of the Ws that wait. At each word, first: if more than `delay` wait and this word is not the send of "
    "a gradient (send_B…), do the oldest now. Then B becomes I, and its W joins the list; `reduce0` lets all that "
    "wait go first; everything else is copied. What waits after the last word comes at the end.",
    'waiting, out = [], []; for word in words: if len(waiting) > delay and not word.startswith("send_B"): '
    'out.append(waiting.pop(0)); if word.startswith("B"): out.append("I" + word[1:]); waiting.append("W" + word[1:]); '
    'elif word.startswith("reduce"): out += waiting; waiting = []; out.append(word); else: out.append(word). Return '
    "out + waiting.",
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end?",
    "keeps_b": "The whole backwards are still there. Where I and W are, there is no B: it consists of them.",
    "forgets_the_last": "W is missing for the last micro-batches. When the words come to an end, some Ws still wait, "
    "as many as the delay: without them a part of the weights' gradient is never computed, and nothing fails.",
    "reduces_early": "The gradient is reduced before the last W, whose share is then never reduced. Every replica "
    "steps with another gradient. What waits has to be done before reduce0.",
    "w_before_the_send": "W comes between I and the send of its gradient. The stage before waits for that message, "
    "and I is all it needs: so nothing is gained over a whole B.",
    "no_delay": "W follows its I at once, whatever `delay` is. The stage before is helped, but nothing is left for "
    "the cool-down to fill its gaps with.",
    "all_at_the_end": "All W come at the end. That fills the gaps, but until a W is done its micro-batch's "
    "activations are kept: all m of them, as in GPipe.",
    "newest_first": "The newest W that waits is done first. As many wait at any time, but the first micro-batch's "
    "activations then stay until the end, and the gradient is summed in another order, with other last bits: "
    "pop(0) takes the oldest.",
    "one_early": "W comes one backward sooner than asked: W of micro-batch i waits for `delay` *further* I, its own is "
    "not among them. The cool-down then has less to fill its gaps with.",
    "one_late": "W comes one backward later than asked. Its activations are kept that much longer, on every rank.",
    "moves_words": "Something else has moved, got lost or come in. Forwards, sends, receives and the reduction stay as "
    "they are.",
    "changes_the_input": "The list that was passed has changed. Build a new one.",
}


class Case(NamedTuple):
    """One rank's words under 1F1B, the delay, and what came back."""

    m: int
    delay: int
    given: list[str]
    found: list[str]
    touched: bool

    def numbers(self, op: str) -> list[int]:
        """The micro-batches of an op, -1 for one that names none."""
        return [int(w[1:]) if w[1:].isdigit() else -1 for w in self.found if w[0] == op]

    def rest(self) -> bool:
        """Whether everything but the backwards is as it was, each I where its B was."""
        now = ["B" + w[1:] if w[0] == "I" else w for w in self.found if w[0] != "W"]
        return sorted(now, key=_reduces) == self.given

    def complete(self) -> bool:
        return sorted(self.numbers("W")) == sorted(self.numbers("I")) == list(range(self.m))

    def reduced_last(self) -> bool:
        return not any(map(_reduces, self.found[:-1]))

    def sent_first(self) -> bool:
        """Whether what follows an I is its send, where its B had one."""
        follows = dict(zip(self.given, self.given[1:]))
        after = dict(zip(self.found, self.found[1:]))
        return all(after.get(f"I{i}") == follows[f"B{i}"] for i in range(self.m)
                   if follows.get(f"B{i}", "").startswith("send_B"))  # fmt: skip

    def left(self) -> list[tuple[int, int, bool]]:
        """At each W: the halves left to do before it, the backwards done, and whether its own was."""
        done: set[str] = set()
        out, waiting = [], 0
        for w in self.found:
            if w[0] == "I":
                done.add(w[1:])
                waiting += 1
            elif w[0] == "W":
                out.append((waiting, len(done), w[1:] in done))
                waiting -= 1
        return out

    def behind(self) -> bool:
        return all(own for _, _, own in self.left())

    def in_order(self) -> bool:
        return self.numbers("W") == self.numbers("I")

    def early(self) -> bool:
        """Whether a W is done while no more than `delay` wait and further backwards come."""
        return any(waiting <= self.delay and done < self.m for waiting, done, _ in self.left())

    def most(self) -> int:
        """The most halves left to do when another compute begins."""
        most = waiting = 0
        for k, w in enumerate(self.found):
            waiting += (w[0] == "I") - (w[0] == "W")
            begins = self.found[k + 1:k + 2] and self.found[k + 1][0] in "FI"
            most = max(most, waiting if begins else 0)
        return most

    def __str__(self) -> str:
        return f"split_backward('{' '.join(self.given)}', {self.delay}) gave {' '.join(self.found)}"


@exercise("10.3", title="split the backward", minutes=10, needs="split_backward", hints=HINTS, mistakes=MISTAKES)
def split_the_backward(answer: Callable, draw: random.Random) -> Verdict:
    """Rows over the example and the ranks of some 1F1B pipelines, with delays from 0 to more than there are."""
    example = ["recv_F0", "F0", "recv_F1", "B0", "send_B0", "F1", "B1", "send_B1", "reduce0"]
    cases = []
    for given, m, delay in [(example, 2, 1), *_drawn(draw)]:
        case = _split(answer, given, m, delay)
        if isinstance(case, Row):
            return Verdict((case,), "no_result" if case.seen.endswith("gave None") else "")
        cases.append(case)
    wanted = "recv_F0 F0 recv_F1 I0 send_B0 F1 I1 send_B1 W0 W1 reduce0"
    rows = (
        Row("the example of the text", " ".join(cases[0].found) == wanted, wanted, " ".join(cases[0].found)),
        _row("I and W of each micro-batch, once, W after I", "no B is left", cases,
             lambda c: c.complete() and c.behind()),
        _row("all else is as it was", "the same words in the same order", cases, lambda c: c.rest() and not c.touched),
        _row("the gradient leaves before any W", "send_B right after I", cases, Case.sent_first),
        _row("W waits, but no longer than asked", "done when `delay` further backwards are",
             cases, lambda c: not c.early() and c.most() <= c.delay),
        _row("the oldest W first", "in the order of the I", cases, Case.in_order),
        _row("the reduction comes last", "after the last W", cases, Case.reduced_last),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(cases))


def _drawn(draw: random.Random) -> list[tuple[list[str], int, int]]:
    """Ranks of 1F1B with delays: none, the rank's own, more than there are micro-batches; one without a reduction."""
    out = []
    for delay in (0, 1, 2, 3, 9):
        p = draw.randint(2, 4)
        m, rank = draw.randint(p + 2, p + 5), draw.randrange(p)
        out.append((words_of(with_messages(add_reductions(one_f_one_b(p, m))))[rank], m, delay))
    alone = words_of(one_f_one_b(1, 4))[0]
    whole = words_of(with_messages(add_reductions(one_f_one_b(4, 12))))  # 12: numbers of two digits
    return [*out, (alone, 4, 1), *((words, 12, rank) for rank, words in enumerate(whole))]


def _split(answer: Callable, given: list[str], m: int, delay: int) -> Case | Row:
    passed, shown = list(given), f"split_backward([{', '.join(given[:4])}, …], {delay})"
    got = call(answer, passed, delay, shown=shown)
    if hasattr(got, "__next__"):
        got = call(list, got, shown=shown)
    if not is_words(got) or not all(got):
        return Row("returns a list of words", False, '["F0", "I0", …]', f"{shown} gave {str(got)[:80]}")
    return Case(m, delay, given, list(got), passed != given)


def _reduces(word: str) -> bool:
    return word.startswith("reduce")


def _mistake(cases: Sequence[Case]) -> str:
    """The mistake that explains what is seen, the plainest first."""
    if any(c.touched for c in cases):
        return "changes_the_input"
    if any("B" in [w[0] for w in c.found] for c in cases):
        return "keeps_b"
    if not all(c.rest() for c in cases):
        return "moves_words"
    if not all(c.complete() for c in cases):
        short = [c for c in cases if not c.complete()]
        once = all(len(set(c.numbers("W"))) == len(c.numbers("W")) for c in short)
        return "forgets_the_last" if once and all(set(c.numbers("W")) < set(range(c.m)) for c in short) else ""
    if not all(c.reduced_last() for c in cases):
        return "reduces_early"
    if not all(c.sent_first() for c in cases):
        return "w_before_the_send"
    delayed = [c for c in cases if 0 < c.delay < c.m - 1]
    if all(c.most() == 0 for c in delayed):
        return "no_delay"
    if all(c.left()[0][0] == c.m for c in cases):
        return "all_at_the_end"
    if all(c.most() <= c.delay for c in cases) and not all(c.in_order() for c in cases):
        return "newest_first"
    off = {c.most() - c.delay for c in delayed}
    return {(-1,): "one_early", (1,): "one_late"}.get(tuple(off), "")


def _row(name: str, expected: str, cases: Sequence[Case], holds: Callable[[Case], bool]) -> Row:
    """One rule over all its cases. The shortest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: len(c.given))
    return Row(name, not broken, expected, str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} lists")
