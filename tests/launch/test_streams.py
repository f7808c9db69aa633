"""CUDA tensors on a wire: in which order the streams, the host and gloo have their turns. The GPU is a stand-in."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from course_lib.launch import streams
from course_lib.launch.wire import _in_memory


@pytest.fixture
def turns(monkeypatch) -> list[str]:
    said: list[str] = []

    class Stream:
        def __init__(self, device) -> None:
            self.name = f"side of {device}"

        def wait_event(self, event) -> None:
            said.append(f"{self.name} waits for {event}")

        def synchronize(self) -> None:
            said.append(f"the host waits for {self.name}")

    @contextmanager
    def stream(one):
        said.append(f"on {one.name}")
        yield
        said.append(f"off {one.name}")

    def current(device):
        return SimpleNamespace(record_event=lambda: said.append(f"event on {device}") or f"the event on {device}")

    for name, fake in (("Stream", Stream), ("stream", stream), ("current_stream", current)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(streams, "devices_of", lambda tensors: iter(tensors))
    return said


def test_a_transfer_comes_after_what_was_written_and_ends_for_every_stream(turns) -> None:
    work = SimpleNamespace(wait=lambda: turns.append("gloo's wait"))
    begin = streams.in_order(lambda: turns.append("gloo's start") or work, ["cuda:0"])
    assert turns == ["event on cuda:0"]  # at issue, on the thread and stream of whoever issued
    begun = begin()
    begun.wait()
    assert turns[1:] == ["side of cuda:0 waits for the event on cuda:0", "on side of cuda:0", "gloo's start",
                         "off side of cuda:0", "on side of cuda:0", "gloo's wait", "off side of cuda:0",
                         "the host waits for side of cuda:0"]


def test_on_the_cpu_nothing_comes_between() -> None:
    start = object()
    assert streams.in_order(start, [[torch.ones(2)], torch.ones(1), None]) is start


def test_messages_of_cuda_tensors_are_refused(monkeypatch) -> None:
    _in_memory([torch.ones(2)])
    monkeypatch.setattr("course_lib.launch.wire.devices_of", lambda tensors: iter(["cuda:1"]))
    with pytest.raises(ValueError, match="a tensor on cuda:1 cannot be sent to one rank"):
        _in_memory([torch.ones(2)])
