"""Several ranks played in one process, one after the other, twice: the first time to see what each rank gives to
its collectives, the second time with what the others gave. Whatever calls the learner's code makes, the check has
an answer for them, and ranks that do not make the same calls are found instead of waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Exchange = Callable[[Any], list]
"""A collective: takes this rank's value, returns the values of all ranks."""


class Hang(BaseException):
    """A rank waits in a collective that another never enters. No `except Exception` may swallow it."""


class Outcome(NamedTuple):
    """What one rank did: its result (None if it hangs), its calls of the collective, and whether it hangs."""

    result: Any
    calls: int
    hangs: bool


def replay(play: Callable[[int, Exchange], Any], ranks: int) -> list[Outcome]:
    """`play(rank, exchange)` plays one rank from a fresh start. What it gives in one call must not depend on
    what an earlier call returned."""
    given: list[list[Any]] = [[] for _ in range(ranks)]
    for rank in range(ranks):
        def note(value: Any, rank: int = rank) -> list:
            given[rank].append(value)
            return [value] * ranks

        play(rank, note)
    return [_answered(play, rank, given) for rank in range(ranks)]


def _answered(play: Callable[[int, Exchange], Any], rank: int, given: list[list[Any]]) -> Outcome:
    calls = 0

    def exchange(value: Any) -> list:
        nonlocal calls
        calls += 1
        if any(len(theirs) < calls for theirs in given):
            raise Hang
        return [theirs[calls - 1] if other != rank else value for other, theirs in enumerate(given)]

    try:
        return Outcome(play(rank, exchange), calls, False)
    except Hang:
        return Outcome(None, calls, True)


def calls_text(outcomes: list[Outcome], given_up: str = "waits for ever") -> str:
    """How often each rank entered the collective, and who is left waiting."""
    return "; ".join(f"rank {rank} called it {_times(o.calls)}{f' and {given_up}' if o.hangs else ''}"
                     for rank, o in enumerate(outcomes))


def _times(calls: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(calls, f"{calls} times")
