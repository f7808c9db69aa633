"""What a check is given in place of a learner's function or class: calling it calls the learner's in its sandbox."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from course_lib.grade.channel import BadMessage
from course_lib.lab.guard import Broke

if TYPE_CHECKING:
    from course_lib.grade.session import Session

MOST_VALUES = 100_000


class StandIn:
    """Something of the learner's: a function, a class, or an instance of one."""

    def __init__(self, session: Session, described: dict) -> None:
        self._session, self._number = session, int(described["near"])
        self._kind, self._type = str(described.get("kind")), str(described.get("type"))[:80]

    @classmethod
    def of(cls, session: Session, described: dict) -> StandIn:
        return (StandInIterator if described.get("iterates") is True else cls)(session, described)

    @property
    def kind(self) -> str:
        """`function`, `class` or `object`, as the other side says."""
        return self._kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._session.request({"op": "get", "object": self._number, "name": name})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        code = self._session.codec
        message = {"op": "call", "object": self._number, "args": [code.encode(a) for a in args],
                   "kwargs": {k: code.encode(v) for k, v in kwargs.items()}}  # fmt: skip
        return self._session.request(message, args)

    def call_there(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(this, *args)` over there, with a function of the course's exercises (`guard.on_its_side`). Raises
        `Broke` for what the learner's code raised in it."""
        self._session.load_torch()
        try:
            return self._session.request({"op": "through", "object": self._number,
                                          "function": [function.__module__, function.__name__],
                                          "args": [self._session.codec.encode(a) for a in args]})  # fmt: skip
        except NotImplementedError:
            raise
        except (Exception, SystemExit) as error:
            if (name := type(error).__name__) == Broke.__name__:
                raise Broke(str(error)) from None
            raise Broke(f"{function.__name__} raised {name}: {error}{getattr(error, 'learner_place', '')}") from None

    def __repr__(self) -> str:
        return f"<{self._type}>"

    def __deepcopy__(self, memo: dict) -> StandIn:
        return self

    def __reduce__(self) -> Any:
        raise Broke(f"an object of the class {self._type} cannot be written to a checkpoint here. Keep numbers, names "
                    "and tensors, in lists and dictionaries")


class StandInIterator(StandIn):
    """An iterator of the learner's, such as a generator. Each value is asked for when it is needed."""

    _values = 0

    def __iter__(self) -> StandInIterator:
        return self

    def __next__(self) -> Any:
        self._values += 1
        if self._values > MOST_VALUES:
            raise BadMessage(f"an iterator that has not ended after {MOST_VALUES} values")
        return self._session.request({"op": "next", "object": self._number})
