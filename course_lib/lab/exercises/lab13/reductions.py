"""Exercise 13.1: the pass that moves the reductions.

The learner writes `reduce_early(words)`: what one rank does, with its reductions at the end, becomes the same list with
the reductions of each stage right behind the stage's last W (its last B where the backward is not split). All else
stays in its order.

What comes back is judged by what it does: everything still there, no reduction before the last share of its gradient,
and no computation between that and the reduction. Which bucket of a stage goes first is left open.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from course_lib.lab.guard import Broke, call
from course_lib.lab.model import Row, Verdict, exercise
from course_lib.lab.workbench.pipeline_words import is_words
from course_lib.schedule.action import COMPUTE, LAST_USE, Action, Op, Schedule
from course_lib.schedule.generators import interleaved, one_f_one_b, zb_v, zero_bubble
from course_lib.schedule.joint import delay_weights, naive

HINTS = (
    "For each stage of the rank: behind which word is its gradient complete? Look for it in the *list*: the last W "
    "that stands there, whatever its number. A rank whose backward is not split has no W; there it is the last B.",
    "Go through the words once and note for each stage the position of its last W or B: a dictionary, in which later "
    "positions overwrite earlier ones. Then build a new list: leave the reductions out where they stand, and behind "
    "each noted position put all reductions of that stage.",
    'last = {word.split("@")[1]: k for k, word in enumerate(words) if word[0] in "WB"}; moving = [w for w in words if '
    'w.startswith("reduce")]; then for k, word in enumerate(words): if word not in moving, append it, and if '
    'last.get(word.split("@")[1]) == k, append those of `moving` with the same stage.',
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end?",
    "changes_the_input": "The list that was passed has changed. Whoever passed it still needs it: build a new one.",
    "loses_reductions": "A reduction is missing, or there twice. A bucket that is never reduced lets its replicas "
    "drift apart, and nothing fails; one that is reduced twice counts its gradient twice.",
    "forgets_b": "It goes wrong where the backward is not split. There is no W there: the last B completes the "
    "gradient, and the reductions belong behind that.",
    "moves_words": "Something other than the reductions has moved or got lost. Steps, gathers and frees stay where "
    "they are; what they are good for comes in the next exercise.",
    "behind_the_last_i": "The reductions stand behind the last I of their stage. I gives the gradient of the stage's "
    "*input*; that of its weights is complete only when the last W is done.",
    "by_number": "You take the W of the last micro-batch for the last W. Schedules do W in any order that suits them: "
    "what counts is which one stands last in the list.",
    "behind_the_first_w": "The reductions stand behind the first W of their stage. That has the share of one "
    "micro-batch; those of the others would never be reduced.",
    "before_the_last_w": "A reduction comes before the last W of its stage, whose share would never be reduced. Each "
    "stage has a last W of its own: look for that of the stage that the reduction names.",
    "one_block": "All reductions of the rank still go at one time, one behind the other on one wire, when nothing is "
    "left to compute. A stage that is done early can send early: its reductions go behind *its* last W.",
    "one_bucket": "One bucket of each stage has moved, the others still wait at the end. All of them are complete at "
    "the same moment.",
}  # fmt: skip

EXAMPLE = ["F0@0", "F0@2", "I0@2", "W0@2", "I0@0", "W0@0", "reduce0@2", "reduce0@0", "step@2", "step@0"]
WANTED = "F0@0 F0@2 I0@2 W0@2 reduce0@2 I0@0 W0@0 reduce0@0 step@2 step@0"


class Case(NamedTuple):
    """One rank's list: its kind, what it was, what came back."""

    kind: str
    given: list[str]
    found: list[str]
    touched: bool

    def kept(self) -> bool:
        return _others(self.found) == _others(self.given)

    def complete(self) -> bool:
        return Counter(_reductions(self.found)) == Counter(_reductions(self.given))

    def early(self, end: Callable[[Sequence[str], str], int] | None = None) -> bool:
        """Whether a reduction comes before its stage is done."""
        at = end or _last_use
        return any(self.found.index(w) < at(self.found, _stage(w)) for w in _reductions(self.found))

    def late(self) -> list[str]:
        """The reductions before which something computes that need not."""
        return [w for w in _reductions(self.found)
                if any(_computes(x) for x in self.found[_last_use(self.found, _stage(w)) + 1:self.found.index(w)])]

    def some_went(self) -> bool:
        """Whether of each stage with a late reduction another one is in time."""
        late = self.late()
        return {_stage(w) for w in late} <= {_stage(w) for w in _reductions(self.found) if w not in late}

    def in_one_block(self) -> bool:
        """Whether nothing is computed between the first reduction and the last."""
        places = [k for k, w in enumerate(self.found) if w.startswith("reduce")]
        return not any(map(_computes, self.found[places[0]:places[-1]]))

    def __str__(self) -> str:
        return f"{self.kind}: {_shortened(self.given)} became {_shortened(self.found)}"


@exercise("13.1", title="move the reductions", minutes=12, needs="reduce_early", hints=HINTS, mistakes=MISTAKES)
def reduce_at_the_last_use(answer: Callable, draw: random.Random) -> Verdict:
    """Rows over the example and the ranks of several pipelines, with one stage a rank and with more, of one bucket and
    of more, with backwards that are split and others, and with W in another order."""
    cases = []
    for kind, given in [("the example", EXAMPLE), *_drawn(draw)]:
        try:
            case = _moved(answer, kind, given)
        except Broke as broke:
            row = Row("your code runs without an exception", False, "a result", str(broke))
            return Verdict((row,), "" if any(w[0] == "W" for w in given) else "forgets_b")
        if isinstance(case, Row):
            return Verdict((case,), "no_result" if case.seen.endswith("gave None") else "")
        cases.append(case)
    there = [c for c in cases if c.complete()]
    rows = [
        Row("the example of the text", " ".join(cases[0].found) == WANTED, WANTED, " ".join(cases[0].found)),
        _row("each reduction is there, once", "as many as before", cases, Case.complete),
        _row("all else is as it was", "the same words in the same order", cases,
             lambda c: c.kept() and not c.touched),
    ]
    if there:
        rows += [_row("no gradient is reduced before it is complete", "behind the last W or B of its stage", there,
                      lambda c: not c.early()),
                 _row("nothing is computed before a reduction that can go", "right behind the stage's last W or B",
                      there, lambda c: c.early() or not c.late())]  # fmt: skip
    return Verdict(tuple(rows), "" if all(row.ok for row in rows) else _mistake(cases))


def _drawn(draw: random.Random) -> list[tuple[str, list[str]]]:
    """(kind, words of one rank): every rank of each schedule."""
    m = draw.randint(3, 5)
    split = zero_bubble(2, m, 3)
    made = {
        "zero bubble, 3 stages a rank": split,
        "ZB-V": zb_v(draw.randint(2, 3), m),
        "one stage a rank": zero_bubble(draw.randint(2, 3), m + 1),
        "W from the last": _other_way(delay_weights(split, draw.randint(2, 2 * m - 2))),
        "1F1B, backward in one": one_f_one_b(3, m),
        "interleaved, backward in one": interleaved(2, 2 * draw.randint(1, 2), 2),
        "zero bubble, stages of two digits": zero_bubble(2, 2, 6),
    }
    return [(kind, [str(a) for a in actions]) for kind, schedule in made.items()
            for actions in naive(schedule, [draw.randint(1, 3) for _ in range(schedule.stages)]).ranks]


def _other_way(schedule: Schedule) -> Schedule:
    """The W that end a rank's list in reverse order."""

    def turned(actions: tuple[Action, ...]) -> list[Action]:
        cut = 1 + max(k for k, a in enumerate(actions) if a.op is not Op.W)
        return [*actions[:cut], *reversed(actions[cut:])]

    return schedule.with_ranks(turned(actions) for actions in schedule.ranks)


def _moved(answer: Callable, kind: str, given: list[str]) -> Case | Row:
    passed, shown = list(given), f"reduce_early(words) for {kind} ({_shortened(given)})"
    got = call(answer, passed, shown=shown)
    if hasattr(got, "__next__"):
        got = call(list, got, shown=shown)
    if not is_words(got):
        return Row("returns a list of words", False, '["F0@0", …, "step@0"]', f"{shown} gave {str(got)[:80]}")
    return Case(kind, given, list(got), passed != given)


def _mistake(cases: Sequence[Case]) -> str:
    """The mistake that explains what is seen, the plainest first."""
    split, whole = ([c for c in cases if any(w[0] == "W" for w in c.given) is there] for there in (True, False))
    if any(c.touched for c in cases):
        return "changes_the_input"
    if any(not c.complete() for c in cases):
        right = all(c.complete() and not c.early() and not c.late() for c in split)
        return "forgets_b" if right else "loses_reductions"
    if any(not c.kept() for c in cases):
        return "moves_words"
    if early := [c for c in cases if c.early()]:
        if all(c.kind == "W from the last" for c in early):
            return "by_number"
        if all(_stands_behind(c, "I", first=False) for c in split):
            return "behind_the_last_i"
        return "behind_the_first_w" if all(_stands_behind(c, "W", first=True) for c in split) else "before_the_last_w"
    late = [c for c in cases if c.late()]
    if late and all(c in whole for c in late):
        return "forgets_b"
    if late and all(c.some_went() for c in late):
        return "one_bucket"
    return "one_block" if late and all(c.in_one_block() for c in late) else ""


def _stands_behind(case: Case, op: str, first: bool) -> bool:
    """Whether each reduction follows the first or the last `op` of its stage, with no other computation between."""
    for w in _reductions(case.found):
        places = [k for k, x in enumerate(case.found) if x[0] == op and _computes(x) and _stage(x) == _stage(w)]
        at = case.found.index(w)
        if not places or not (place := places[0] if first else places[-1]) < at:
            return False
        if any(_computes(x) for x in case.found[place + 1:at]):
            return False
    return True


def _computes(word: str) -> bool:
    return Action.parse(word).op in COMPUTE if _known(word) else False


def _known(word: str) -> bool:
    head, _, stage = word.partition("@")
    return stage.isdigit() and head[:1].isupper()


def _stage(word: str) -> str:
    return word.partition("@")[2]


def _reductions(words: Sequence[str]) -> list[str]:
    return [w for w in words if w.startswith("reduce")]


def _others(words: Sequence[str]) -> list[str]:
    return [w for w in words if not w.startswith("reduce")]


def _last_use(words: Sequence[str], stage: str) -> int:
    """Where the stage's last W or B stands; -1 where there is none."""
    return max((k for k, w in enumerate(words) if _computes(w) and _stage(w) == stage
                and Action.parse(w).op in LAST_USE), default=-1)  # fmt: skip


def _shortened(words: Sequence[str]) -> str:
    """The end of a list, which is what matters here."""
    return " ".join(words) if len(words) <= 18 else "… " + " ".join(words[-18:])


def _row(name: str, expected: str, cases: Sequence[Case], holds: Callable[[Case], bool]) -> Row:
    """One rule over all its cases. The shortest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: len(c.given))
    return Row(name, not broken, expected, str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} lists")
