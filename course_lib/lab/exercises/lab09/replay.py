"""Several ranks that talk to each other, played in one process without threads.

A rank is played from its start until it waits for something that no rank has done yet; then the next rank is played.
Whoever waits is played again from the start once the others have done more. When a whole round brings nothing new,
those that are left wait for ever: that is a deadlock, and it is found instead of waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Blocked(BaseException):
    """A rank waits for the others. Its text is what it waits for. No `except Exception` may swallow it."""


class Ended(NamedTuple):
    """What the ranks that came to an end returned, and what the others wait for, by rank."""

    results: dict[int, Any]
    waits: dict[int, str]


def play(ranks: int, one: Callable[[int], Any], known: Callable[[], int]) -> Ended:
    """`one(rank)` plays a rank from a fresh start, with what the others have done so far. `known()` counts what has
    been done; it only grows."""
    results: dict[int, Any] = {}
    waits: dict[int, str] = {}
    before = -1
    while len(results) < ranks and (now := known() + len(results)) > before:
        before = now
        for rank in range(ranks):
            if rank not in results:
                try:
                    results[rank] = one(rank)
                    waits.pop(rank, None)
                except Blocked as blocked:
                    waits[rank] = str(blocked)
    return Ended(results, waits)
