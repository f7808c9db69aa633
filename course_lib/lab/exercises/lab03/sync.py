"""Exercise 3.1: no_sync.

The learner writes three methods; the cell of the exercise gives the rest:

    class GradientSync:
        def __init__(self, all_reduce):
            self.all_reduce = all_reduce    # all_reduce() averages all gradients over the ranks; blocking
            self.sync = True                # are we outside no_sync()?
            self.armed = True               # will the next backward send?

        @contextmanager
        def no_sync(self): ...
        def before_forward(self): ...       # called when a forward begins
        def after_backward(self): ...       # called when a backward has ended

        def inside_no_sync(self, body):     # given: the check opens the block through it
            with self.no_sync():
                body()

As in DDP **the forward decides**: a backward sends if the forward before it began outside `no_sync()`, wherever the
backward itself stands. Blocks may be nested. An exception leaves the block as it was found, and goes on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from course_lib.lab.guard import Broke, call
from course_lib.lab.model import Row, Verdict, exercise

Script = tuple  # of "forward", "backward", "error", and tuples: what happens inside a no_sync block

HINTS = (
    "Two flags. `sync` says where we are: inside a no_sync block or not. `armed` says what the last forward decided. "
    "Who sets which, and who reads which?",
    "`no_sync` remembers `sync`, makes it False, yields, and puts back what it remembered, also when the block raises: "
    "try and finally. `before_forward` copies `sync` into `armed`. `after_backward` looks at `armed` only.",
    "no_sync: before, self.sync = self.sync, False; try: yield; finally: self.sync = before. before_forward: "
    "self.armed = self.sync. after_backward: if self.armed: self.all_reduce().",
)

MISTAKES = {
    "never_silent": "Your backward sends inside no_sync as well, so a window of N micro-steps costs N all-reduces. "
    "Does no_sync change `self.sync`, and does after_backward ask?",
    "never_sends": "Nothing is sent, not even outside no_sync. The ranks step on their own gradients and drift apart.",
    "sends_elsewhere": "all_reduce() runs at another time than at the end of a backward, or more than once there. "
    "Opening or closing a block sends nothing, and neither does a forward: after_backward sends, once.",
    "never_back": "After the block nothing is sent any more. Put `self.sync` back when the block ends.",
    "backward_decides": "Whether a backward sends depends on more than its own forward: it reads `sync` itself, or the "
    "block changes `armed`. In DDP the forward decides: it prepares the reducer for the backward that follows. With "
    "no_sync around backward only, DDP sends in every micro-step. Keep in `armed` what the forward saw, and let "
    "nothing else touch it.",
    "no_finally": "After an exception inside the block, synchronisation stays off: one bad batch, and the replicas "
    "drift apart without a word. Put `self.sync` back in a `finally`.",
    "swallows": "An exception from inside the block does not come out. Whoever should skip the batch never hears of "
    "it. Use try and finally, without an except.",
    "not_nested": "The end of an inner block switches synchronisation on inside the outer one. Put back what you "
    "found, not True.",
}


class Case(NamedTuple):
    """One script played: for each backward whether it sent and whether it should have; how many all-reduces there were
    beside those; whether an error came out."""

    script: Script
    sent: list[bool]
    due: list[bool]
    more: int
    errors_kept: bool

    @property
    def right(self) -> bool:
        return self.sent == self.due

    def __str__(self) -> str:
        marks = ", ".join("sent" if sent else "silent" for sent in self.sent)
        lost = "" if self.errors_kept else "; the error inside never came out"
        more = f"; {self.more} all-reduces more" if self.more else ""
        return f"{_text(self.script)}: backward {marks}{more}{lost}"


@exercise("3.1", title="no_sync", minutes=8, needs="GradientSync", hints=HINTS, mistakes=MISTAKES, kind="class")
def send_once(answer: type, draw: random.Random) -> Verdict:
    """Rows over windows of one to eight micro-steps, and over what goes wrong around them."""
    for name in ("no_sync", "before_forward", "after_backward", "inside_no_sync"):
        if not callable(getattr(answer, name, None)):
            raise Broke(f"the class has no method `{name}`")
    windows = [_played(answer, _window(n)) for n in (1, 2, 4, 8)]
    windows += [_played(answer, _window(draw.randint(2, 6)) * 2) for _ in range(3)]
    micro = ("forward", "backward")
    split = [_played(answer, script) for script in (
        ("forward", ("backward",)), (("forward",), "backward"), (("forward",), "backward", "forward", ("backward",)),
        (*_window(draw.randint(2, 4)), "forward", ("backward",)))]  # fmt: skip
    errors = [_played(answer, script) for script in (
        (("error",), *micro), (("forward", "error"), *micro),
        ((*micro, "error"), *micro, *_window(draw.randint(2, 4))))]  # fmt: skip
    nested = [_played(answer, script) for script in (
        ((*micro, micro, *micro), *micro), ((micro, *micro), *micro), (((*micro, micro), *micro), *micro))]  # fmt: skip
    rows = (
        _row("one all-reduce a window", "silent inside no_sync, sent after it", windows, lambda c: c.right),
        _row("nothing else is sent", "all_reduce() at the end of a backward, once", [*windows, *nested],
             lambda c: not c.more),
        _row("the forward decides", "a backward sends if its forward began outside", split, lambda c: c.right),
        _row("an exception comes out", "whoever called you sees it", errors, lambda c: c.errors_kept),
        _row("synchronised again after an exception", "the next window sends", errors, lambda c: c.right),
        _row("a block inside a block", "silent until the outer one ends", nested, lambda c: c.right),
    )
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(windows, split, errors, nested))


def _mistake(windows: list[Case], split: list[Case], errors: list[Case], nested: list[Case]) -> str:
    """The mistake that explains what is seen; the plainest one first."""
    if any(c.more for c in (*windows, *nested)):
        return "sends_elsewhere"
    if not all(c.right for c in windows):
        if all(all(c.sent) for c in windows):
            return "never_silent"
        if not any(any(c.sent) for c in windows):
            return "never_sends"
        silent_after = all(c.sent == c.due[:1] + [False] * (len(c.due) - 1) for c in windows)
        return "never_back" if silent_after else ""
    if not all(c.right for c in split):
        return "backward_decides"
    if not all(c.errors_kept for c in errors):
        return "swallows"
    if not all(c.right for c in errors):
        return "no_finally"
    return "not_nested" if not all(c.right for c in nested) else ""


def _row(name: str, expected: str, cases: list[Case], holds: Callable[[Case], bool]) -> Row:
    """One rule over all its cases. The shortest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: len(_text(c.script)))
    seen = str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} scripts"
    return Row(name, not broken, expected, seen)


def _window(micro_steps: int) -> Script:
    """N−1 micro-steps inside one block, the last outside."""
    micro = ("forward", "backward")
    return (micro * (micro_steps - 1), *micro) if micro_steps > 1 else micro


def _played(answer: type, script: Script) -> Case:
    """The script carried out on a fresh object."""
    sends, sent, due, kept = [0], [], [], [True]
    outside = [True]

    def all_reduce() -> None:
        sends[0] += 1

    sync = call(answer, all_reduce, shown="GradientSync(all_reduce)")

    def do(parts: Script, silent: bool) -> None:
        for part in parts:
            if part == "forward":
                outside[0] = not silent
                call(sync.before_forward, shown=f"before_forward() in {_text(script)}")
            elif part == "backward":
                before = sends[0]
                call(sync.after_backward, shown=f"after_backward() in {_text(script)}")
                sent.append(sends[0] > before)
                due.append(outside[0])
            elif part == "error":
                raise ValueError(BAD)
            else:
                _block(sync, lambda part=part: do(part, True), kept, script)

    do(script, False)
    return Case(script, sent, due, sends[0] - sum(sent), kept[0])


BAD = "a bad batch"


def _block(sync: Any, body: Callable[[], None], kept: list[bool], script: Script) -> None:
    """`body` inside a block of the learner's. Its own error must come out again, and no other."""
    raised = [False]

    def noted() -> None:
        try:
            body()
        except ValueError:
            raised[0] = True
            raise

    try:
        call(sync.inside_no_sync, noted, shown=f"the block in {_text(script)}")
    except Broke as broke:
        if isinstance(broke.__cause__, Broke):  # a method that was called inside the block broke
            raise broke.__cause__ from None
        if not (raised[0] and BAD in str(broke.__cause__)):
            raise
        return
    kept[0] &= not raised[0]


def _text(script: Script) -> str:
    return ", ".join(f"no_sync[{_text(part)}]" if isinstance(part, tuple) else part for part in script)
