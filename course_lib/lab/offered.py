"""What a learner's code may ask of an object that a check hands to it.

In a notebook a check's own objects, as a wire that only plays one, lie in the learner's process. A grader keeps them in
its own: the learner's code gets stand-ins, which answer for the names that the object's class offers here and for
nothing else. What a class does not offer, such as the book of what was launched, cannot be reached from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)
_OFFERED: dict[type, frozenset[str]] = {}


def offers(*names: str) -> Callable[[_Class], _Class]:
    """`@offers("launch", "ranks")` above a class: these attributes and methods are the learner's, as the text of the
    exercise says. They count for this very class: one that is derived from it says anew what it offers. A class that
    offers nothing is one whose objects can only be handed on. Raises `ValueError` for a private name."""
    if private := [name for name in names if name.startswith("_")]:
        raise ValueError(f"a check's class cannot offer {private[0]!r}: names that begin with _ are its own")

    def declare(kind: _Class) -> _Class:
        _OFFERED[kind] = frozenset(names)
        return kind

    return declare


def offered_by(value: Any) -> frozenset[str] | None:
    """The names that the object's class offers; None for a class that does not say."""
    return _OFFERED.get(type(value))


def all_offers() -> dict[type, frozenset[str]]:
    """Of every class that was imported so far."""
    return dict(_OFFERED)
