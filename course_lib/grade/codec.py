"""Values as plain JSON, the same rules on both sides.

Numbers, strings, booleans and None are themselves, lists are lists, and so are ranges and a dictionary's keys and
values. A tuple is {"t": […]}, a dictionary {"d": [[key, value], …]}, a set {"s": […]}, a tensor {"x": …} (see
`mirror`). An object that cannot travel stays where it is and is named by a number: {"far": n} is an object of the
receiver, {"near": n} one of the sender.

What comes out of `decode` has exactly the built-in types, whatever the classes were that went in: an object whose
`>` is always true arrives as a number or not at all.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, ItemsView, KeysView, ValuesView
from typing import TYPE_CHECKING, Any

from course_lib.grade.channel import BadMessage

if TYPE_CHECKING:
    from course_lib.grade.mirror import Mirror

DEEPEST = 40


class Codec:
    """`far(value)` gives the receiver's number of a stand-in, or None; `near(value)` gives a number to an object
    that stays here; `stand_in(number, description)` and `own(number)` are the way back. `stays(value)` says of what
    could travel as well that it stays here."""

    def __init__(self, mirror: Mirror, far: Callable[[Any], int | None], near: Callable[[Any], dict],
                 stand_in: Callable[[dict], Any], own: Callable[[int], Any],
                 stays: Callable[[Any], bool] = lambda value: False) -> None:  # fmt: skip
        self.mirror, self._far, self._near, self._stand_in, self._own = mirror, far, near, stand_in, own
        self._stays = stays

    def encode(self, value: Any, depth: int = 0) -> Any:
        """Raises `BadMessage` for what is nested too deeply (a list that contains itself, for instance)."""
        if depth > DEEPEST:
            raise BadMessage(f"a value nested more than {DEEPEST} deep")
        if value is None or type(value) in (bool, int, float, str):
            return value
        if (number := self._far(value)) is not None:
            return {"far": number}
        if self._stays(value):
            return self._near(value)
        if isinstance(value, list | tuple | set | frozenset):
            parts = [self.encode(part, depth + 1) for part in list(value)]
            return parts if isinstance(value, list) else {"t" if isinstance(value, tuple) else "s": parts}
        if isinstance(value, range | KeysView | ValuesView | ItemsView):
            return [self.encode(part, depth + 1) for part in list(value)]
        if isinstance(value, dict):
            return {"d": [[self.encode(k, depth + 1), self.encode(v, depth + 1)] for k, v in dict(value).items()]}
        if isinstance(value, bool | int | float | str):
            plain = next(kind for kind in (bool, int, float, str) if isinstance(value, kind))
            return plain(value)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return {"x": self.mirror.describe(value)}
        number = _number(value)
        return number if number is not None else self._near(value)

    def decode(self, value: Any, depth: int = 0) -> Any:
        """Raises `BadMessage` for what `encode` does not make."""
        if depth > DEEPEST:
            raise BadMessage(f"a value nested more than {DEEPEST} deep")
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, list):
            return [self.decode(part, depth + 1) for part in value]
        if not isinstance(value, dict) or (len(value) != 1 and "near" not in value):
            raise BadMessage("a value of unknown form")
        try:
            if "near" in value:
                return self._stand_in(value)
            (tag, content), = value.items()
            if tag == "far":
                return self._own(content)
            if tag == "x":
                return self.mirror.tensor(content)
            if tag == "d":
                return {self.decode(k, depth + 1): self.decode(v, depth + 1) for k, v in content}
            return {"t": tuple, "s": set}[tag](self.decode(part, depth + 1) for part in content)
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
            raise BadMessage(f"a value of unknown form ({error})") from None


def _number(value: Any) -> int | float | None:
    """A number of another library, as of numpy, as Python's own; None for what is no scalar number."""
    if not type(value).__module__.startswith("numpy") or getattr(value, "shape", None) != ():
        return None
    try:
        return operator.index(value)
    except TypeError:
        try:
            return float(value)
        except (TypeError, ValueError):
            return None
