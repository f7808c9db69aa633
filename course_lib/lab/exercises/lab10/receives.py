"""Exercise 10.2: place the receives.

The learner writes `place_receives(lists, receive_of, needs)`:

- `lists[r]` are the words of rank r, compute and sends, in their order: "F0@0", "send_F0@0", …
- `receive_of(send)` gives (rank, word): who receives it, and as what, as in (1, "recv_F0@1").
- `needs(word)` is the receive whose message a compute takes in, or None.
- The result has every receive once, at a place where it is posted: a send goes on only when its receive is posted, a
  compute only when its message has arrived. Posting takes no time. What comes from one rank is received in the order
  in which that rank sends. A posted receive holds a buffer until it is used: in long windows of 1F1B no more than p+1.

What comes back is judged by `schedule.check`, on schedules of several kinds. Any placement that runs will do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from course_lib.lab.guard import TookTooLong, call, time_limit
from course_lib.lab.model import Row, Verdict, exercise
from course_lib.lab.workbench.pipeline_words import is_words, message_of, schedule_of, without_receives
from course_lib.schedule.action import COMPUTE, RECEIVES, Schedule, ScheduleError
from course_lib.schedule.check import check
from course_lib.schedule.generators import gpipe, interleaved, one_f_one_b, zb_v, zero_bubble

HINTS = (
    "Play all ranks at once, with a finger on the next word of each list. A compute can go when its message has been "
    "sent; a send can always go. Whenever a rank sends, its receiver must just then be ready: so write the receive "
    "down for the receiver at that moment.",
    "Keep for each rank what it has written (`out`) and how far it is (`at`), and a set of receives that were "
    "written. Go around the ranks; each does its next word if `needs(word)` is None or in the set, else it waits for "
    "its next turn. For a send, write the receive into the *receiver's* list, and then the send into its own.",
    "while any rank has words left: for r in range(len(lists)): if at[r] < len(lists[r]): word = lists[r][at[r]]; if "
    'needs(word) is None or needs(word) in posted: if word.startswith("send"): peer, receive = receive_of(word); '
    "out[peer].append(receive); posted.add(receive); then out[r].append(word); at[r] += 1.",
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end?",
    "endless": "Your loop goes round and round. Where a rank waits, another has to move on: does each that can go take "
    "a step in every round, does a send let its receiver go, and do you stop when all words are placed?",
    "circle": "Two ranks both stand at a send, and each waits for the other to post its receive. Receives have to be "
    "posted before the rank begins to send, not right before their message is needed.",
    "order": "What one rank receives from another is not in the order in which the other sends. Messages carry no "
    "names: the first receive takes the first message, whatever it was meant for. Where a rank holds several stages, "
    "forwards and gradients come from the same peer, mixed.",
    "all_first": "Receives are posted long before their messages come. It runs, but each one that is posted holds a "
    "buffer. If everything is posted at the beginning, those are as many as there are micro-batches: the memory that "
    "1F1B was made to save.",
    "incomplete": "A receive is missing, or there twice. Each send has exactly one, on the rank that receives.",
    "moves_words": "The words that were there have changed. Compute and sends stay as they are, in their order; only "
    "receives come between them.",
    "changes_the_input": "The lists that were passed have changed. Whoever passed them still needs them: build new "
    "ones.",
}


SECONDS, NOT_ENDED = 2.0, "was still running"


class Case(NamedTuple):
    """One schedule: its kind, what it was without receives, what came back, and what is wrong with that."""

    kind: str
    given: Schedule
    lists: list[list[str]]
    kept: bool
    touched: bool
    fault: str
    held: int

    @property
    def size(self) -> tuple[int, int]:
        return len(self.lists), self.given.micro_batches

    def __str__(self) -> str:
        said = f"{self.kind}, p = {len(self.lists)}, m = {self.given.micro_batches}"
        return f"{said}: {self.fault}" if self.fault else f"{said}; rank 0: {' '.join(self.lists[0][:14])} …"


@exercise("10.2", title="place the receives", minutes=12, needs="place_receives", hints=HINTS, mistakes=MISTAKES)
def place_the_receives(answer: Callable, draw: random.Random) -> Verdict:
    """Rows over GPipe, 1F1B, interleaved and zero-bubble schedules of one to four ranks, and long windows of 1F1B."""
    p, m = draw.randint(2, 4), draw.randint(3, 6)
    kinds = {"1F1B": one_f_one_b(2, 2), "GPipe": gpipe(p, m), "a single rank": one_f_one_b(1, 3),
             "GPipe, backwards from the last": _reversed(p, m), "GPipe, odd ranks from the last": _crossed(p, m),
             "1F1B, ": one_f_one_b(draw.randint(3, 4), m + 2), "interleaved": interleaved(2, 2 * draw.randint(2, 3), 2),
             "interleaved, ": interleaved(3, m, 2), "zero bubble": zero_bubble(p, m + 2),
             "ZB-V": zb_v(draw.randint(2, 3), m)}
    long = {"1F1B, a long window": one_f_one_b(3, 16), "1F1B, a long window ": one_f_one_b(4, 20)}
    cases = []
    for kind, schedule in (kinds | long).items():
        case = _placed(answer, kind.rstrip(", "), schedule)
        if isinstance(case, Row):
            endings = {"gave None": "no_result", NOT_ENDED: "endless"}
            return Verdict((case,), next((key for end, key in endings.items() if case.seen.endswith(end)), ""))
        cases.append(case)
    rows = [
        _row("what was there is still there", "the same words in the same order", cases, lambda c: c.kept),
        _row("each message is received once, in the order of its sender, and nobody waits in a circle",
             "a schedule that runs", cases, lambda c: not c.fault or not c.kept),
        _row("the lists that were passed", "unchanged", cases, lambda c: not c.touched),
    ]  # fmt: skip
    if longest := [c for c in cases if c.kind.endswith("window") and not c.fault]:
        rows.append(_row("buffers in a long window", "at most p + 1 receives posted and not used", longest,
                         lambda c: c.held <= len(c.lists) + 1, lambda c: f"{c}; it holds {c.held}"))  # fmt: skip
    return Verdict(tuple(rows), "" if all(row.ok for row in rows) else _mistake(cases))


def _reversed(p: int, m: int) -> Schedule:
    """GPipe as its paper has it: the last forward's backward comes first."""
    given = gpipe(p, m)
    return given.with_ranks((*a[:m], *reversed(a[m:])) for a in given.ranks)


def _crossed(p: int, m: int) -> Schedule:
    """GPipe in which neighbours take the micro-batches in opposite orders."""
    given = gpipe(p, m)
    return given.with_ranks((*reversed(a[:m]), *a[m:]) if r % 2 else a for r, a in enumerate(given.ranks))


def _placed(answer: Callable, kind: str, compute: Schedule) -> Case | Row:
    """What came back for one schedule, or the row that says why it is no answer."""
    lists, receive_of, needs = without_receives(compute)
    passed = [list(words) for words in lists]
    shown = f"place_receives(lists, receive_of, needs) for {kind}, {len(lists)} ranks,"
    try:
        with time_limit(SECONDS):
            got = call(answer, passed, receive_of, needs, shown=shown)
            got = call(list, got, shown=shown) if hasattr(got, "__next__") else got
    except TookTooLong:
        return Row("your code comes to an end", False, f"within {SECONDS:g} s", f"{shown} {NOT_ENDED}")
    if not isinstance(got, list | tuple) or len(got) != len(lists) or not all(map(is_words, got)):
        return Row("returns a list of words for each rank", False, f"{len(lists)} lists of words",
                   f"{shown} gave {str(got)[:80]}")  # fmt: skip
    found = [list(words) for words in got]
    kept = [[w for w in words if not w.startswith("recv")] for words in found] == lists
    fault, held = "", 0
    try:
        schedule = schedule_of(found, compute.rank_of, compute.micro_batches)
        check(schedule)
        held = _most_held(schedule)
    except ScheduleError as error:
        fault = str(error).partition(" A send goes on")[0]
    return Case(kind, compute, found, kept, passed != lists, fault, held)


def _most_held(schedule: Schedule) -> int:
    """The most receives that a rank has posted and not used, at any time."""
    most = 0
    for actions in schedule.ranks:
        now = 0
        for action in actions:
            now += action.op in RECEIVES
            most = max(most, now)
            now -= action.op in COMPUTE and message_of(schedule, action) is not None
    return most


def _mistake(cases: Sequence[Case]) -> str:
    """The mistake that explains what is seen, the plainest first."""
    if any(not c.kept for c in cases):
        return "changes_the_input" if any(c.touched for c in cases) and not any(c.fault for c in cases) else \
            "moves_words"
    if any(" lacks recv" in c.fault or " times" in c.fault or "nobody takes part" in c.fault for c in cases):
        return "incomplete"
    stuck, mixed = ([c for c in cases if words in c.fault] for words in ("the schedule stops", "expects"))
    if any(c.kind == "1F1B" for c in stuck):
        return "circle"
    if mixed or stuck:
        return "order" if mixed else "circle"
    if any(c.touched for c in cases):
        return "changes_the_input"
    return "all_first" if any(c.held > len(c.lists) + 1 for c in cases) else ""


def _row(name: str, expected: str, cases: Sequence[Case], holds: Callable[[Case], bool],
         said: Callable[[Case], str] = str) -> Row:  # fmt: skip
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: c.size)
    return Row(name, not broken, expected, said(broken[0]) if broken else f"held in {len(cases)} schedules")


