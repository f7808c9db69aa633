"""Exercise 12.3: gather each unit's parameters ahead of their use, and free them after the last (ZeRO stage 3).

The learner writes `run_pass(order, wire, compute, ahead)`:

- `order` lists units in the order of their use in one pass. A tied unit occurs more than once.
- `wire.gather(u)` starts to gather unit u and returns a handle at once; after `handle.wait()` its parameters are
  there; `wire.free(u)` gives their memory back. `compute(u)` uses them.
- While the unit at place i is computed, those at the places up to i + ahead are on their way or there, and no others
  but what has been used and is needed again.
- Each unit is gathered once in a pass, and freed after its last use.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from course_lib.lab.exercises.lab12.pass_wire import PassWire, Use
from course_lib.lab.guard import call
from course_lib.lab.model import Row, Verdict, exercise

HINTS = (
    "Look at one place i of `order`. Which units have to be on their way before compute begins? Which one is waited "
    "for? And after it: is this unit used again further behind?",
    "Keep the handles in a dict by unit. Before compute, start each of order[i : i + 1 + ahead] that is not in the "
    "dict yet; a slice may reach over the end. Then wait for this unit alone. Free it if this was its last place.",
    "last = {u: i for i, u in enumerate(order)}; coming = {}. for i, u in enumerate(order): for v in "
    "order[i : i + 1 + ahead]: if v not in coming: coming[v] = wire.gather(v). Then coming[u].wait(); compute(u); "
    "if last[u] == i: wire.free(u).",
)

MISTAKES = {
    "before_its_gather": "You compute with a unit whose parameters have not arrived. They are in memory of the right "
    "size, in part old and in part new: no error, and a wrong result. Wait for the unit you are about to use.",
    "frees_tied": "You free a unit that is used again later in this pass, and then compute with what is not there. "
    "Free it at its last place in `order`.",
    "gathers_again": "A unit is gathered more than once. A tied unit's second use finds it there already if it is not "
    "freed in between; and one that is on its way need not be asked for again.",
    "gathers_too_early": "Units are gathered before their time. The whole model then lies in memory of every rank, "
    "which is what stage 3 was to avoid.",
    "gathers_too_late": "While a unit is computed, the next is not on its way. Start it before compute, not after.",
    "always_one": "You gather one ahead, whatever `ahead` says. It may be 0, or 2.",
    "waits_for_the_next": "You wait for a unit that is not needed yet: compute stands still until the next one has "
    "arrived too, and nothing overlaps. Start it, keep the handle, and wait when its turn comes.",
    "never_frees": "Units stay whole after their last use. Free each when `order` does not name it again.",
    "frees_late": "Units are freed only when the pass is over, or later than they could be. Until then they add up in "
    "memory, to the whole model at the end. Free each right after its last use.",
    "leaves_out": "Not every use is computed, or not in the order of the list. Every place of `order` is one use, the "
    "last one and the second of a tied unit too.",
}


@dataclass(frozen=True)
class Case:
    """One pass, and what the wire saw of it."""

    order: tuple[int, ...]
    ahead: int
    wire: PassWire

    def complete(self) -> bool:
        return [use.unit for use in self.wire.uses] == list(self.order)

    def unready(self) -> list[Use]:
        return [use for use in self.wire.uses if use.state != "whole"]

    def once(self) -> bool:
        return sorted(self.wire.gathers) == sorted(set(self.order))

    def missing(self) -> list[tuple[int, int]]:
        """(place, unit) where a unit was not on its way in time."""
        return [(i, u) for i, use in enumerate(self.wire.uses) for u in self.order[i:i + 1 + self.ahead]
                if u not in use.started]  # fmt: skip

    def early(self) -> list[tuple[int, int]]:
        """(place, unit) where a unit was on its way before its time."""
        first = {u: i for i, u in reversed(list(enumerate(self.order)))}
        return [(i, u) for i, use in enumerate(self.wire.uses) for u in sorted(use.started)
                if first[u] > i + self.ahead]  # fmt: skip

    def waited(self) -> list[tuple[int, int]]:
        """(place, unit) where a unit had been waited for before its first use."""
        first = {u: i for i, u in reversed(list(enumerate(self.order)))}
        return [(i, u) for i, use in enumerate(self.wire.uses) for u in sorted(use.waited) if first[u] > i]

    def overdue(self) -> list[tuple[int, int]]:
        """(place, unit) where a unit was still there after its last use."""
        last = {u: i for i, u in enumerate(self.order)}
        return [(i, u) for i, use in enumerate(self.wire.uses) for u in sorted(use.started) if last[u] < i]

    def as_if(self, ahead: int) -> bool:
        """Whether the gathers are those of another `ahead`."""
        other = Case(self.order, ahead, self.wire)
        return not other.missing() and not other.early()

    def __str__(self) -> str:
        said = f"order {list(self.order)}, ahead {self.ahead}"
        if not self.complete():
            return f"{said}: computed {[use.unit for use in self.wire.uses]}"
        if unready := self.unready():
            return f"{said}: unit {unready[0].unit} was {unready[0].state} when it was used"
        if not self.once():
            return f"{said}: gathered {self.wire.gathers}"
        for found, what in ((self.missing(), "was not on its way"), (self.early(), "was on its way already"),
                            (self.waited(), "had been waited for"), (self.overdue(), "was still there")):
            if found:
                place, unit = found[0]
                return f"{said}: while unit {self.order[place]} at place {place} was computed, unit {unit} {what}"
        left = sorted(self.wire.alive())
        return f"{said}: at the end {'unit ' + ', '.join(map(str, left)) if left else 'nothing'} was left"


@exercise("12.3", title="prefetch ahead", minutes=10, needs="run_pass", hints=HINTS, mistakes=MISTAKES)
def prefetch_the_next(answer: Callable, draw: random.Random) -> Verdict:
    """Rows over some thirty passes: forward and backward order, with and without a tied unit, 0 to 3 ahead."""
    cases = []
    for ahead in (1, 0, 2, 3):
        for count in (1, 2, 3, draw.randint(4, 7)):
            plain = list(range(count))
            tied = [*plain, 0] if count > 1 else [0, 0]
            twice = draw.sample(plain, count)
            twice.insert(draw.randint(1, count), twice[0])
            cases += [_played(answer, order, ahead) for order in (plain[::-1], tied, twice)]
    plain = [c for c in cases if len(set(c.order)) == len(c.order)]
    tied = [c for c in cases if c not in plain]
    rows = (
        _row("every use is computed, in order", "compute(u) for each place of the list", cases, Case.complete),
        _row("a unit is there when it is used", "waited for, and not freed", plain, lambda c: not c.unready()),
        _row("a tied unit is there at each of its uses", "freed after the last one", tied, lambda c: not c.unready()),
        _row("each unit is gathered once", "one gather a unit and pass", cases, Case.once),
        _row("the next units are on their way", "`ahead` places, before compute", cases, lambda c: not c.missing()),
        _row("no unit before its time", "at most `ahead` places", cases, lambda c: not c.early()),
        _row("nobody waits for what comes later", "a wait at its own turn", cases, lambda c: not c.waited()),
        _row("freed after the last use", "nothing left over", cases, lambda c: not c.overdue() and not c.wire.alive()),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(cases, plain, tied))


def _mistake(cases: list[Case], plain: list[Case], tied: list[Case]) -> str:
    """The mistake that explains what is seen; the plainest one first."""
    if not all(c.complete() for c in cases):
        return "leaves_out"
    if any(c.unready() for c in plain):
        return "before_its_gather"
    if any(c.unready() for c in tied):
        return "frees_tied" if all(use.state == "absent" for c in tied for use in c.unready()) else "before_its_gather"
    if any(c.missing() or c.early() for c in plain if c.ahead != 1) and all(c.as_if(1) for c in plain):
        return "always_one"
    if any(c.missing() for c in plain):
        return "gathers_too_late"
    if any(c.early() for c in plain):
        return "gathers_too_early"
    if not all(c.once() for c in cases):
        return "gathers_again"
    if any(c.waited() for c in cases):
        return "waits_for_the_next"
    if any(c.overdue() or c.wire.alive() for c in cases):
        return "frees_late" if not any(c.wire.alive() for c in cases) else "never_frees"
    return ""


def _played(answer: Callable, order: list[int], ahead: int) -> Case:
    wire = PassWire(frozenset(order), limit=4 * len(order))

    def compute(u: int) -> None:
        wire.compute(u)

    call(answer, list(order), wire, compute, ahead, shown=f"run_pass({order}, wire, compute, {ahead})")
    return Case(tuple(order), ahead, wire)


def _row(name: str, expected: str, cases: list[Case], holds: Callable[[Case], bool]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: (len(c.order), c.ahead))
    seen = str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} passes"
    return Row(name, not broken, expected, seen)
