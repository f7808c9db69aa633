"""The grader's end of a conversation with a learner's code in a sandbox.

The check functions of `course_lib.lab.exercises` run here, in the grader, and are given stand-ins: calling one
calls the learner's function over there. Objects that a check makes, such as a fake wire, stay here, and the
learner's code is given stand-ins for them, of which it sees only what their class offers (`course_lib.lab.offered`).
"""

from __future__ import annotations

import builtins
import dataclasses
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from course_lib.grade import sandbox
from course_lib.grade.channel import BadMessage, Channel
from course_lib.grade.codec import Codec
from course_lib.grade.mirror import Mirror
from course_lib.grade.stand_in import StandIn
from course_lib.lab.offered import offered_by

START_SECONDS = 60.0
"""For a sandbox to start, and for torch to be loaded in it."""
MEMORY_MB = 3072
_MOST_CALLBACKS = 200_000


class Session:
    """A sandboxed process with the learner's cells in it. Use it in a `with` block.

    Every request may raise `Gone`, `Late` or `BadMessage`, and whatever exception the learner's code raised,
    as an exception of the same name whose `learner_place` says where.
    """

    def __init__(self) -> None:
        self._work = Path(tempfile.mkdtemp(prefix="course-check-"))
        ours, theirs = socket.socketpair()
        argv = ["-c", "from course_lib.grade.inmate import main; main()", str(theirs.fileno())]
        self.box = sandbox.start(argv, work=self._work, limits=sandbox.Limits(memory_mb=MEMORY_MB),
                                 keep=[theirs.fileno()])  # fmt: skip
        theirs.close()
        self.channel = Channel(ours, self._look)
        self.raised: set[str] = set()
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._callbacks = self._requests = 0
        self._torch = False
        self.codec = Codec(Mirror("g", holds=False), self._far, self._near, self._stand_in, self._own,
                           stays=lambda value: offered_by(value) is not None)  # fmt: skip

    def allow(self, seconds: float) -> None:
        """From now on the other side has this long."""
        self.channel.deadline = time.monotonic() + seconds

    def cell(self, name: str, source: str) -> None:
        """Run a cell over there."""
        self.request({"op": "cell", "name": name, "source": source})

    def load_torch(self) -> None:
        """Load it over there, once. That takes seconds, which are not the learner's: their clock stands still."""
        if self._torch:
            return
        self._torch, deadline, began = True, self.channel.deadline, time.monotonic()
        self.allow(START_SECONDS)
        self.request({"op": "torch"})
        self.channel.deadline = None if deadline is None else deadline + time.monotonic() - began

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
        sandbox.remove(self._work)

    def _look(self) -> None:
        self.box.take_output()
        if self.box.flooded:
            raise Flooded

    def _send(self, message: dict) -> None:
        if changes := self.codec.mirror.changes():
            message["sync"] = changes
            self.load_torch()
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
                if name not in _offered(target):
                    raise AttributeError(f"{type(target).__name__!r} object has no attribute {name!r}")
                value = getattr(target, name)
            elif asked["op"] == "next" and isinstance(target, Iterator):
                value = next(target)
            elif asked["op"] == "call" and type(target) in (FunctionType, MethodType):
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
                if type(now) is type(ours) and _plain(ours) and _plain(now) and now != ours:
                    ours.clear()
                    ours.extend(now) if isinstance(ours, list) else ours.update(now)

    def _exception(self, reply: dict) -> BaseException:
        limits = {"error": 100, "message": 2000, "place": 300}
        name, message, place = (str(reply.get(key, ""))[:limit] for key, limit in limits.items())
        self.raised.add(name)
        kind = getattr(builtins, name, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception | SystemExit)) or kind in _WITH_ARGUMENTS:
            kind = type(name if name.isidentifier() else "Exception", (Exception,), {})
        error = kind(message)
        error.learner_place = place
        return error

    def _stand_in(self, described: dict) -> StandIn:
        return StandIn.of(self, described)

    def _far(self, value: Any) -> int | None:
        return object.__getattribute__(value, "_number") if isinstance(value, StandIn) else None

    def _near(self, value: Any) -> dict:
        if id(value) not in self._numbers or self._objects[self._numbers[id(value)]] is not value:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return {"near": self._numbers[id(value)]} | ({"iterates": True} if isinstance(value, Iterator) else {})

    def _own(self, number: int) -> Any:
        if type(number) is not int or not 0 <= number < len(self._objects):
            raise KeyError("there is no such object")
        return self._objects[number]


class Flooded(BaseException):
    """The learner's code printed more than the limit."""


_WITH_ARGUMENTS = {UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError, ExceptionGroup}


def _offered(target: Any) -> frozenset[str]:
    """What the object's class offers. Records of the course (frozen dataclasses) show their fields; else nothing."""
    if (names := offered_by(target)) is not None:
        return names
    if (made := getattr(type(target), "__dataclass_params__", None)) is not None and made.frozen:
        return frozenset(field.name for field in dataclasses.fields(target))
    return frozenset()


def _plain(value: Any) -> bool:
    """Whether a list or dictionary holds, at any depth, only what is compared by value."""
    parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return all(_plain(part) if isinstance(part, list | tuple | dict) else isinstance(part, int | float | str | None)
               for part in parts)  # fmt: skip
