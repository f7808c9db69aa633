"""Several ranks played in one process, one after the other, more than once.

The first time shows what each rank gives to its collectives; then each is played with what the others gave. Whatever
calls the learner's code makes, the check has an answer for them, and ranks that do not make the same calls are found
instead of waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from course_lib.lab.guard import Broke

Exchange = Callable[[Any], list]
"""A collective: takes this rank's value, returns the values of all ranks."""


class Hang(BaseException):
    """A rank waits in a collective that another never enters. No `except Exception` may swallow it."""


class Outcome(NamedTuple):
    """What one rank did: its result (None if it hangs), its calls of the collective, and whether it hangs."""

    result: Any
    calls: int
    hangs: bool


def replay(play: Callable[[int, Exchange], Any], ranks: int, depends: bool = False) -> list[Outcome]:
    """`play(rank, exchange)` plays one rank from a fresh start. With `depends`, what a rank gives in one call may
    depend on what an earlier call returned: then the ranks are played once more for every call, each time with what
    the others gave before, until the last call has been given what it really gets."""
    given = [_noted(play, rank, ranks) for rank in range(ranks)]
    for _ in range(max(map(len, given)) - 1 if depends else 0):
        given = [_answered(play, rank, given)[1] for rank in range(ranks)]
    return [_answered(play, rank, given)[0] for rank in range(ranks)]


def _noted(play: Callable[[int, Exchange], Any], rank: int, ranks: int) -> list:
    """What this rank gives to its collectives, if all ranks give the same. Where it breaks on what comes back, that is
    made up (a sum of nothing, say): whether it breaks on what really comes back is seen when it is played with that."""
    given: list = []

    def note(value: Any) -> list:
        given.append(value)
        return [value] * ranks

    with suppress(Broke):
        play(rank, note)
    return given


def _answered(play: Callable[[int, Exchange], Any], rank: int, given: list[list]) -> tuple[Outcome, list]:
    """The rank played with what the others gave, and what it gives itself."""
    mine: list = []

    def exchange(value: Any) -> list:
        mine.append(value)
        if any(len(theirs) < len(mine) for theirs in given):
            raise Hang
        return [value if other == rank else theirs[len(mine) - 1] for other, theirs in enumerate(given)]

    try:
        return Outcome(play(rank, exchange), len(mine), False), mine
    except Hang:
        return Outcome(None, len(mine), True), mine


def calls_text(outcomes: list[Outcome], given_up: str = "waits for ever") -> str:
    """How often each rank entered the collective, and who is left waiting."""
    return "; ".join(f"rank {rank} called it {_times(o.calls)}{f' and {given_up}' if o.hangs else ''}"
                     for rank, o in enumerate(outcomes))


def _times(calls: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(calls, f"{calls} times")
