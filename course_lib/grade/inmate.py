"""Run inside the sandbox: holds the learner's code and does what the grader asks of it.

It takes requests on an inherited socket and sends JSON back. Nothing here knows a right answer, so nothing
here needs to be defended: whatever the learner's code does to this process, it can only change its own answers.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import linecache
import socket
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from course_lib.grade.cell import new_namespace, run_cell
from course_lib.grade.channel import Channel, Gone
from course_lib.grade.codec import Codec
from course_lib.grade.mirror import Mirror


class Remote:
    """An object of the grader. Its attributes are asked for; what can be called is called over there."""

    def __init__(self, inmate: Inmate, number: int) -> None:
        object.__setattr__(self, "_inmate", inmate)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._inmate.ask({"op": "get", "object": self._number, "name": name})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        code = self._inmate.codec
        return self._inmate.ask({"op": "call", "object": self._number, "args": [code.encode(a) for a in args],
                                 "kwargs": {k: code.encode(v) for k, v in kwargs.items()}})  # fmt: skip


class RemoteIterator(Remote):
    """An iterator of the grader."""

    def __iter__(self) -> RemoteIterator:
        return self

    def __next__(self) -> Any:
        return self._inmate.ask({"op": "next", "object": self._number})


class Inmate:
    """Serves one conversation."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.namespace = new_namespace()
        self._objects: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Remote] = {}
        self.codec = Codec(Mirror("s", holds=True), self._far, self._near, self._stand_in, self._objects.__getitem__)

    def serve(self) -> None:
        """Answer until the grader has gone."""
        while True:
            request = self.channel.receive()
            if "op" in request:
                self._answer(request)

    def ask(self, request: dict) -> Any:
        """Ask the grader, and answer what it asks in between."""
        self._send(request)
        while True:
            reply = self.channel.receive()
            if "op" in reply:
                self._answer(reply)
                continue
            self.codec.mirror.apply(reply.get("sync"))
            if "error" in reply:
                kind = getattr(builtins, reply["error"], RuntimeError)
                raise kind(reply["message"])
            return self.codec.decode(reply["value"])

    def _answer(self, request: dict) -> None:
        try:
            self.codec.mirror.apply(request.get("sync"))
            reply = getattr(self, f"_do_{request['op']}")(request)
            self._send({**reply, "to": request["number"]})
        except Gone:
            raise
        except BaseException as error:
            self._send({**_told(error), "to": request["number"]})

    def _send(self, message: dict) -> None:
        if changes := self.codec.mirror.changes():
            message["sync"] = changes
        self.channel.send(message)

    def _do_torch(self, request: dict) -> dict:
        import torch

        torch.set_num_threads(1)
        return {"value": None}

    def _do_cell(self, request: dict) -> dict:
        run_cell(request["name"], request["source"], self.namespace)
        return {"value": None}

    def _do_name(self, request: dict) -> dict:
        if request["name"] not in self.namespace:
            raise NameError(request["name"])
        return {"value": self.codec.encode(self.namespace[request["name"]])}

    def _do_get(self, request: dict) -> dict:
        return {"value": self.codec.encode(getattr(self._objects[request["object"]], request["name"]))}

    def _do_next(self, request: dict) -> dict:
        return {"value": self.codec.encode(next(self._objects[request["object"]]))}

    def _do_call(self, request: dict) -> dict:
        args = [self.codec.decode(arg) for arg in request["args"]]
        kwargs = {key: self.codec.decode(value) for key, value in request["kwargs"].items()}
        value = self._objects[request["object"]](*args, **kwargs)
        after = [self.codec.encode(arg) if isinstance(arg, list | dict) else None for arg in args]
        return {"value": self.codec.encode(value), "after": after}

    def _do_through(self, request: dict) -> dict:
        """Call a function of the course's exercises with an object of the learner's."""
        module, name = request["function"]
        if not module.startswith("course_lib.lab.exercises."):
            raise ValueError(f"{module} is no module of the exercises")
        function = getattr(importlib.import_module(module), name)
        args = [self.codec.decode(arg) for arg in request["args"]]
        return {"value": self.codec.encode(function(self._objects[request["object"]], *args))}

    def _far(self, value: Any) -> int | None:
        return object.__getattribute__(value, "_number") if type(value) in (Remote, RemoteIterator) else None

    def _near(self, value: Any) -> dict:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects[len(self._objects)] = value
        kind = "class" if isinstance(value, type) else "function" if callable(value) else "object"
        return {"near": self._numbers[id(value)], "kind": kind, "type": type(value).__name__,
                "iterates": isinstance(value, Iterator)}  # fmt: skip

    def _stand_in(self, described: dict) -> Remote:
        number = described["near"]
        kind = RemoteIterator if described.get("iterates") else Remote
        return self._remotes.setdefault(number, kind(self, number))


def _told(error: BaseException) -> dict:
    """The exception in words, with the last line of the learner's own code that it passed through."""
    place = ""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith("<exercise")]
    if isinstance(error, SyntaxError) and error.lineno:
        place = f" in line {error.lineno}" + (f": {error.text.strip()}" if error.text else "")
    elif frames:
        line = linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip()
        place = f" in line {frames[-1].lineno}" + (f": {line}" if line else "")
    try:
        message = str(error.msg if isinstance(error, SyntaxError) else error)[:2000]
    except BaseException:
        message = "(its message cannot be shown)"
    return {"error": type(error).__name__[:100], "message": message, "place": place[:300]}


def main() -> None:
    """`python -m course_lib.grade.inmate FD`: serve on the socket with this descriptor."""
    sys.setrecursionlimit(4000)  # a call that was given up waits for ever below the next one: see Session._serve
    inmate = Inmate(Channel(socket.socket(fileno=int(sys.argv[1]))))
    with contextlib.suppress(Gone):
        inmate.serve()


if __name__ == "__main__":
    main()
