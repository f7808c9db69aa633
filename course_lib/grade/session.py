"""The grader's end of a conversation with a learner's code in a sandbox.

The check functions of `course_lib.lab.exercises` run here, in the grader, and are given stand-ins: calling one
calls the learner's function over there. Objects that a check makes, such as a fake wire, stay here, and the
learner's code is given stand-ins for them of which it sees only what `EXPOSED` names.
"""

from __future__ import annotations

import builtins
import dataclasses
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from course_lib.grade import sandbox
from course_lib.grade.channel import BadMessage, Channel
from course_lib.grade.codec import Codec
from course_lib.grade.mirror import Mirror
from course_lib.lab.guard import Broke

EXPOSED = {
    "FakeWire": {"launch"},
    "SummingWire": {"launch", "ranks", "flat", "views"},
    "FakeWork": {"wait", "is_completed"},
    "SummingWork": {"wait", "is_completed"},
    "ClockedWire": {"start_gather", "rank", "ranks"},
    "GatherHandle": {"wait"},
    "PassWire": {"gather", "free"},
    "PassWork": {"wait", "is_completed"},
}
"""What a learner's code may ask of the check's own objects. All else is an AttributeError over there."""

MEMORY_MB = 3072
_MOST_CALLBACKS = 200_000


class Session:
    """A sandboxed process with the learner's cells in it. Use it in a `with` block.

    Every request may raise `Gone`, `Late` or `BadMessage`, and whatever exception the learner's code raised,
    as an exception of the same name whose `learner_place` says where.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="course-check-")
        ours, theirs = socket.socketpair()
        argv = ["-c", "from course_lib.grade.inmate import main; main()", str(theirs.fileno())]
        self.box = sandbox.start(argv, work=Path(self._folder.name), limits=sandbox.Limits(memory_mb=MEMORY_MB),
                                 keep=[theirs.fileno()])  # fmt: skip
        theirs.close()
        self.channel = Channel(ours, self._look)
        self.raised: set[str] = set()
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._callbacks = self._requests = 0
        self.codec = Codec(Mirror("g", holds=False), self._far, self._near, StandIn.of(self), self._own)

    def allow(self, seconds: float) -> None:
        """From now on the other side has this long."""
        self.channel.deadline = time.monotonic() + seconds

    def cell(self, name: str, source: str) -> None:
        """Run a cell over there."""
        self.request({"op": "cell", "name": name, "source": source})

    def load_torch(self) -> None:
        self.request({"op": "torch"})

    def fetch(self, name: str) -> Any:
        """What the cells left under `name`. Raises `NameError` if there is nothing."""
        return self.request({"op": "name", "name": name})

    def request(self, message: dict, args: tuple = ()) -> Any:
        """Ask, and serve what the learner's code asks of the check's objects, until the reply is there."""
        self._requests += 1
        number = message["number"] = self._requests
        self._send(message)
        while True:
            reply = self.channel.receive()
            self.codec.mirror.apply(reply.get("sync"))
            if "op" in reply:
                self._serve(reply)
            elif reply.get("to") != number:
                continue  # the late answer to a call whose time limit was over
            elif "error" in reply:
                raise self._exception(reply)
            else:
                self._restore(args, reply.get("after"))
                return self.codec.decode(reply.get("value"))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.box.end()
        self._folder.cleanup()

    def _look(self) -> None:
        self.box.take_output()
        if self.box.flooded:
            raise Flooded

    def _send(self, message: dict) -> None:
        if changes := self.codec.mirror.changes():
            message["sync"] = changes
        self.channel.send(message)

    def _serve(self, asked: dict) -> None:
        """Do what the learner's code asks of an object of ours, or call a function that the check gave it.

        Exceptions go back to it. What is no `Exception` ends the check's own call: the learner's code then waits
        for ever in that call, and can still be called anew.
        """
        self._callbacks += 1
        if self._callbacks > _MOST_CALLBACKS:
            raise BadMessage("the check's objects were asked more often than any solution could need")
        self.box.take_output()
        try:
            target = self._own(asked["object"])
            if asked["op"] == "get":
                name = asked["name"]
                if name not in EXPOSED.get(type(target).__name__, _fields(target)):
                    raise AttributeError(f"{type(target).__name__!r} object has no attribute {name!r}")
                value = getattr(target, name)
            elif asked["op"] == "call" and _callable(target):
                value = target(*[self.codec.decode(a) for a in asked["args"]],
                               **{k: self.codec.decode(v) for k, v in asked["kwargs"].items()})  # fmt: skip
            else:
                raise TypeError("this object cannot be called")
            reply = {"value": self.codec.encode(value)}
        except Exception as error:
            reply = {"error": type(error).__name__, "message": str(error)}
        self._send(reply)

    def _restore(self, args: tuple, after: Any) -> None:
        """Lists and dictionaries were sent as copies: what was done to the copies is done to ours."""
        if not isinstance(after, list):
            return
        for ours, theirs in zip(args, after):
            if isinstance(ours, list | dict) and theirs is not None:
                now = self.codec.decode(theirs)
                if type(now) is type(ours) and now != ours and _plain(ours):
                    ours.clear()
                    ours.extend(now) if isinstance(ours, list) else ours.update(now)

    def _exception(self, reply: dict) -> BaseException:
        name, message, place = (str(reply.get(key, "")) for key in ("error", "message", "place"))
        self.raised.add(name)
        kind = getattr(builtins, name, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception | SystemExit)) or kind in _WITH_ARGUMENTS:
            kind = type(name if name.isidentifier() else "Exception", (Exception,), {})
        error = kind(message)
        error.learner_place = place
        return error

    def _far(self, value: Any) -> int | None:
        return object.__getattribute__(value, "_number") if isinstance(value, StandIn) else None

    def _near(self, value: Any) -> dict:
        if id(value) not in self._numbers or self._objects[self._numbers[id(value)]] is not value:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return {"near": self._numbers[id(value)]}

    def _own(self, number: int) -> Any:
        if type(number) is not int or not 0 <= number < len(self._objects):
            raise KeyError("there is no such object")
        return self._objects[number]


class Flooded(BaseException):
    """The learner's code printed more than the limit."""


class StandIn:
    """Something of the learner's: a function, a class, or an instance of it."""

    def __init__(self, session: Session, described: dict) -> None:
        self._session, self._number = session, int(described["near"])
        self._kind, self._type = str(described.get("kind")), str(described.get("type"))[:80]

    @classmethod
    def of(cls, session: Session) -> Any:
        return lambda described: cls(session, described)

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


_CALLABLE = set().union(*EXPOSED.values())
_WITH_ARGUMENTS = {UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError, ExceptionGroup}


def _callable(target: Any) -> bool:
    """A function that the check passed as an argument, or a method that was asked for by an exposed name."""
    return type(target) is FunctionType or getattr(target, "__name__", "") in _CALLABLE


def _fields(target: Any) -> set[str]:
    """Records of the course (frozen dataclasses, named tuples) show their fields."""
    if dataclasses.is_dataclass(target):
        return {field.name for field in dataclasses.fields(target)}
    return set()


def _plain(value: Any) -> bool:
    """Whether a list or dictionary holds only what is compared by value."""
    parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return all(isinstance(part, int | float | str | list | tuple) for part in parts)
