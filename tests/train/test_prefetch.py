"""Prefetch: the loader's batches in order, read ahead, its errors where they belong, and no thread left behind."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

from course_lib.record import recording
from course_lib.train.data import batches, text
from course_lib.train.prefetch import Prefetch, _map


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "prefetch" and t.is_alive()]


def gone(seconds: float = 2.0) -> bool:
    end = time.monotonic() + seconds
    while readers() and time.monotonic() < end:
        time.sleep(0.01)
    return not readers()


def test_batches_come_in_order_again_and_again() -> None:
    want = list(batches(text(0.05), 3, 8, 7))
    loader = Prefetch(want, depth=2)
    for _ in range(2):
        got = list(loader)
        assert len(got) == len(loader) == 7
        assert all(torch.equal(x, a) and torch.equal(y, b) for (x, y), (a, b) in zip(got, want))
    assert list(Prefetch([])) == [] and gone()


@pytest.mark.parametrize("depth", [1, 3])
def test_it_reads_while_the_batch_before_is_used_and_no_further_than_asked(depth: int) -> None:
    begun = [threading.Event() for _ in range(9)]

    def source():
        for i, event in enumerate(begun):
            event.set()
            yield i

    for i in Prefetch(source(), depth=depth):
        # `depth` batches wait in the queue, and the reader holds one more that does not fit
        ahead = min(i + depth + 1, len(begun) - 1)
        assert begun[ahead].wait(5), f"batch {ahead} was not begun while batch {i} was used"
        time.sleep(0.02)
        assert not any(event.is_set() for event in begun[ahead + 1:]), "it read further ahead than its depth"


def test_an_error_of_the_loader_comes_where_its_batch_would_have() -> None:
    def source():
        yield 1
        yield 2
        raise KeyError("row 3")

    got = []
    with pytest.raises(KeyError, match="row 3") as error:
        for value in Prefetch(source()):
            got.append(value)
    assert got == [1, 2] and "source" in [entry.name for entry in error.traceback] and gone()


def test_leaving_early_ends_the_reader() -> None:
    def endless():
        while True:
            yield 0

    for _ in Prefetch(endless()):
        break
    assert gone(), "the reader is still running"


def test_a_stuck_loader_is_an_error_and_not_a_hang() -> None:
    release = threading.Event()

    def stuck():
        yield 0
        release.wait(10)

    with pytest.raises(TimeoutError, match=r"no batch within 0\.2 s"):
        list(Prefetch(stuck(), timeout_s=0.2))
    release.set()
    assert gone()
    with pytest.raises(ValueError, match="depth=0"):
        Prefetch([], depth=0)


def test_a_data_loader_goes_through_unchanged() -> None:
    want = list(torch.arange(24.0).view(12, 2))
    got = list(Prefetch(DataLoader(want, batch_size=5)))
    assert [len(batch) for batch in got] == [5, 5, 2] and torch.equal(torch.cat(got), torch.stack(want))


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


def test_nested_batches_keep_their_kind() -> None:
    batch = {"a": [torch.ones(2), (torch.ones(1), "text")], "b": Pair(torch.ones(1), "n"), "c": None}
    doubled = _map(batch, lambda t: t * 2)
    assert doubled["a"][0].tolist() == [2, 2] and doubled["a"][1][1] == "text" and doubled["c"] is None
    assert isinstance(doubled["a"][1], tuple) and isinstance(doubled["b"], Pair) and doubled["b"].x.tolist() == [2]


def test_reading_is_recorded() -> None:
    with recording() as recorder:
        list(Prefetch([1, 2, 3]))
    reads = [s for s in recorder.timeline() if s.lane == "reader"]
    assert len(reads) == 3 and {s.kind for s in reads} == {"host"}
