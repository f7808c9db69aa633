"""What a learner's code may ask of a check's own objects: what their class offers, and nothing else."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from course_lib.grade import stand_in
from course_lib.grade.channel import BadMessage
from course_lib.grade.session import Session, _offered
from course_lib.lab import exercises
from course_lib.lab.exercises.lab06.slow_bus import SlowBus
from course_lib.lab.offered import all_offers, offered_by, offers

ROOT = Path(__file__).resolve().parents[2]


def _declared() -> dict[type, frozenset[str]]:
    for lab in pkgutil.iter_modules(exercises.__path__, f"{exercises.__name__}."):
        importlib.import_module(lab.name)
    return {kind: names for kind, names in all_offers().items() if kind.__module__.startswith(exercises.__name__)}


def _has(kind: type, name: str) -> bool:
    """Whether it is a method, or set by a method of the class or of one that it is derived from."""
    sources = [inspect.getsource(each) for each in kind.__mro__ if each.__module__ != "builtins"]
    sets = {node.attr for source in sources for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}  # fmt: skip
    return callable(getattr(kind, name, None)) or name in sets


def test_what_is_offered_is_there_and_in_the_text() -> None:
    declared = _declared()
    assert len(declared) > 20
    for kind, names in declared.items():
        lab = kind.__module__.split(".")[3]
        text = "".join(path.read_text() for path in (ROOT / "solutions").glob(f"{lab[3:]}_*.py"))
        for name in names:
            assert _has(kind, name), f"{kind.__module__}.{kind.__name__} has no {name}"
            told = name in text or name in ("is_completed", "zero_grad")  # what every handle and optimizer has
            assert told, f"{kind.__name__} of {lab} offers {name}, of which the lab's text says nothing"


def test_nothing_is_offered_that_was_not_declared() -> None:
    @offers("open")
    class Open:
        open = hidden = 1

    class Derived(Open):
        pass

    @dataclass
    class Book:
        answers: int = 3

    @dataclass(frozen=True)
    class Record:
        size: int = 3

    assert _offered(Open()) == {"open"}
    assert offered_by(Derived()) is None
    assert _offered(Derived()) == _offered(Book()) == _offered(Book) == _offered(object()) == frozenset()
    assert _offered(Record()) == {"size"}
    with pytest.raises(ValueError, match="_hidden"):
        offers("_hidden")


@pytest.fixture
def session() -> Iterator[Session]:
    with Session() as session:
        session.allow(30)
        yield session


ASKS = """
def feed(bus, compute, how):
    return eval(how)

def raw(thing, op, **more):
    return thing._inmate.ask({"op": op, "object": thing._number, **more})
"""


@pytest.mark.parametrize(("how", "error"), [
    ("bus.events", "AttributeError"), ("bus._sent", "AttributeError"), ("bus.compute", "AttributeError"),
    ("raw(bus, 'get', name='__class__')", "AttributeError"), ("raw(compute, 'get', name='__self__')", "AttributeError"),
    ("raw(compute, 'get', name='__globals__')", "AttributeError"),
    ("raw(bus, 'call', args=[], kwargs={})", "TypeError"), ("raw(bus, 'next')", "TypeError"),
    ("raw(bus.copy([1.0]), 'get', name='_batch')", "AttributeError"),
    ("list(bus.pin([1.0]))", "TypeError"), ("bus.copy([1.0]).data.append", "AttributeError"),
])  # fmt: skip
def test_the_book_of_a_check_is_out_of_reach(session: Session, how: str, error: str) -> None:
    bus = SlowBus()
    session.cell("<cell>", ASKS)
    with pytest.raises(Exception) as caught:
        session.fetch("feed")(bus, bus.compute, how)
    assert type(caught.value).__name__ == error


def test_what_stays_here_comes_back_as_itself(session: Session) -> None:
    bus = SlowBus()
    session.cell("<cell>", "def one(bus, compute):\n    c = bus.copy(bus.pin([1.0, 2.0]))\n    c.wait()\n"
                           "    return compute(c.data)\n")  # fmt: skip
    assert session.fetch("one")(bus, bus.compute) == 3.0
    assert [(e.what, e.pinned) for e in bus.events] == [("copy", True), ("wait", True), ("compute", True)]


def test_iterators_cross_both_ways_value_by_value(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    session.cell("<cell>", "def up(xs, use):\n    return use(x + 1 for x in xs)\n"
                           "def endless(xs):\n    while True: yield 1\n"
                           "def keys(xs):\n    return xs.keys(), range(3)\n")  # fmt: skip
    taken = []
    given = (taken.append(i) or i for i in range(3))
    assert session.fetch("up")(given, lambda xs: [(x, len(taken)) for x in xs]) == [(1, 1), (2, 2), (3, 3)]
    assert session.fetch("keys")({"a": 1}) == (["a"], [0, 1, 2])
    monkeypatch.setattr(stand_in, "MOST_VALUES", 20)
    with pytest.raises(BadMessage, match="has not ended after 20 values"):
        list(session.fetch("endless")(0))


def test_lists_are_given_back_as_they_were_changed(session: Session) -> None:
    session.cell("<cell>", "def change(xs, deep):\n    xs.append(4)\n    deep['a'].append(5)\n")
    xs, deep = [3], {"a": [1]}
    session.fetch("change")(xs, deep)
    assert (xs, deep) == ([3, 4], {"a": [1, 5]})
