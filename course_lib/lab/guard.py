"""Calling what a learner wrote: its exceptions become a row of the table, an endless loop ends by itself."""

from __future__ import annotations

import linecache
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

HERE = str(Path(__file__).resolve().parent)


class Broke(Exception):
    """The learner's code raised. The message is what the row shows."""


class TookTooLong(BaseException):
    """The time limit is over. No `except Exception` in the learner's code can swallow it."""


class Latest:
    """The last `call`, as the learner would write it, and what it gave; `shown` is empty if there was none. It keeps
    nothing alive but single numbers and texts: some checks look at what the learner's code lets go of."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.remember("", None)

    def remember(self, shown: str, value: Any) -> None:
        self.shown, self._kind = shown, type(value).__name__
        single = value is None or isinstance(value, int | float | complex | str | bytes)
        try:
            self._value = (lambda: value) if single else weakref.ref(value)
        except TypeError:  # a list, say
            self._value = lambda: None
        self._none = value is None

    def text(self, longest: int) -> str:
        """What it gave, in at most about `longest` characters; its type where it cannot be shown or is gone."""
        value = self._value()
        if value is None:
            return "None" if self._none else f"a value of the type {self._kind}"
        try:
            return repr(value)[:longest]
        except Exception:  # more than 4300 digits, or a __repr__ of the learner's
            return f"a value of the type {self._kind} that cannot be shown"


latest = Latest()
"""Of the check that runs in this process: there is one at a time, because its time limit needs the main thread."""


def call(function: Callable[..., Any], *arguments: Any, shown: str) -> Any:
    """The value of `function(*arguments)`. `shown` is the call as the learner would write it.

    Raises `Broke` when it raises, and lets `NotImplementedError` through: that is a stub.
    """
    latest.forget()
    try:
        value = function(*arguments)
    except NotImplementedError:
        raise
    except (Exception, SystemExit) as error:
        raise Broke(f"{shown} raised {in_words(error)}{_place(error)}") from error
    latest.remember(shown, value)
    return value


def in_words(error: BaseException) -> str:
    """The kind of an exception and its message, which may be one that cannot be shown."""
    try:
        return f"{type(error).__name__}: {error}".rstrip(": ")
    except Exception:
        return type(error).__name__


def on_its_side(function: Callable[..., Any], answer: Any, *arguments: Any) -> Any:
    """`function(answer, *arguments)`, where the answer lives: a grader's stand-in has it called in its sandbox.

    For a function of `course_lib.lab.exercises` that needs more of an answer than calls and values: autograd's graph
    does not cross from process to process. It must know no right answer. Exceptions as for `call`.
    """
    there = getattr(type(answer), "call_there", None)
    return function(answer, *arguments) if there is None else there(answer, function, *arguments)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TookTooLong` after `seconds`. Without effect off the main thread and where there are no alarms.

    Limits nest: an alarm that was set before goes on with the time it has left.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, ring)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    began = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:  # an outer limit that ran out meanwhile rings at once
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left - (time.monotonic() - began)))


def _place(error: BaseException) -> str:
    """The last line of the learner's own code that the exception passed through.

    An exception that comes from another process brings it along as `learner_place`.
    """
    if (told := getattr(error, "learner_place", None)) is not None:
        return told
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(HERE)]
    if not frames:
        return ""
    last = [f for f in frames if f.filename == frames[0].filename][-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    return f" in line {last.lineno}" + (f": {line}" if line else "")
