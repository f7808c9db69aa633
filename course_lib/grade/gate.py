"""The grader's side of ranks in a sandbox: it starts each step, times it, and reads the kernel's counters."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from course_lib.grade import sandbox
from course_lib.grade.channel import BadMessage, Channel, Gone, Late
from course_lib.grade.session import Flooded

START_SECONDS = 90.0
STEP_SECONDS = 30.0


class RanksFailed(Exception):
    """The ranks did not deliver. `outcome` says how, the message why."""

    def __init__(self, outcome: str, sentence: str) -> None:
        super().__init__(sentence)
        self.outcome = outcome


class Ranks:
    """Ranks in a sandbox of their own, each with a connection to the grader. Use it in a `with` block.

    Raises `RuntimeError` if ranks without any learner's code fail: that is the grader's fault.
    """

    def __init__(self, ranks: int, fabric: dict, cells: Sequence[tuple[str, str]] = (), finish: bool = False) -> None:
        self.ranks, self._cells, self._finish = ranks, [list(cell) for cell in cells], finish
        self._work = work = Path(tempfile.mkdtemp(prefix="course-bench-"))
        (work / "bench.json").write_text(json.dumps({"ranks": ranks, "fabric": fabric}), encoding="utf-8")
        self._listener = _listening(work / "gate")
        self._listener.listen(ranks)
        argv = ["-c", "from course_lib.grade.bench import main; main()", sandbox.path_of(work, "")]
        self.box = sandbox.start(argv, work=work)
        self.kind = ""
        self._gates: dict[int, Channel] = {}
        self._counters: IO[str] | None = None

    def meet(self) -> None:
        """Wait until all ranks are there. The counters are opened before any learner's code is loaded."""
        end = time.monotonic() + START_SECONDS
        self._listener.settimeout(0.2)
        while len(self._gates) < self.ranks:
            if self.box.process.poll() is not None or time.monotonic() > end:
                self.box.take_output()
                raise RuntimeError(f"the ranks did not start: {self.box.output.decode(errors='replace')[-2000:]}")
            with contextlib.suppress(TimeoutError):
                gate = Channel(self._listener.accept()[0], self._look)
                gate.deadline = end
                hello = gate.receive()
                self._gates[hello["rank"]], self.kind = gate, str(hello["kind"])
        self._listener.close()
        if self.kind == "shaped" and self.box.isolation == sandbox.NAMESPACES:
            self._counters = _open_counters(self.box.process.pid, self.ranks)
        self.ask({"cells": self._cells, "finish": self._finish}, START_SECONDS)

    @property
    def counted_by(self) -> str:
        """Who counts the bytes: `kernel` or `wire`."""
        return "kernel" if self._counters else "wire"

    def ask(self, message: dict, seconds: float = STEP_SECONDS) -> list[dict]:
        """The answer of every rank, rank 0 first. Raises `RanksFailed`."""
        return self.ask_each([message] * self.ranks, seconds)

    def ask_each(self, messages: Sequence[dict], seconds: float = STEP_SECONDS) -> list[dict]:
        try:
            for rank, message in enumerate(messages):
                self._gates[rank].send(message)
            end = time.monotonic() + seconds
            answers = []
            for rank in range(self.ranks):
                self._gates[rank].deadline = end
                answers.append(self._gates[rank].receive())
        except Late:
            raise RanksFailed("timeout", f"A rank was still busy after {seconds:.0f} s.") from None
        except Flooded:
            raise RanksFailed("output_flood", "The ranks printed too much.") from None
        except BadMessage as bad:
            raise RanksFailed("failed_checks", f"A rank sent {bad}.") from None
        except Gone:
            raise RanksFailed("kernel_died", "A rank ended before its step was done.") from None
        for answer in answers:
            if "fault" in answer:
                raise RanksFailed("failed_checks", _said(answer))
        return answers

    def step(self, what: str, number: int, nonces: Sequence[float]) -> tuple[float, list[float]]:
        """Seconds of one step by this process's clock, and the bytes that each rank sent in it."""
        before = self._sent()
        messages = [{"step": what, "number": number, "nonce": nonce} for nonce in nonces]
        begin = time.monotonic()
        answers = self.ask_each(messages)
        seconds = time.monotonic() - begin
        if any(answer.get("done") != number for answer in answers):
            raise RanksFailed("failed_checks", "A rank answered something else than it was asked.")
        after = self._sent() if self._counters else [answer.get("said") for answer in answers]
        if not all(type(value) in (int, float) for value in after):
            raise RanksFailed("failed_checks", "A rank's count of its bytes is no number.")
        sent = [now - then for now, then in zip(after, before)]
        self._said = after
        return seconds, sent

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for gate in self._gates.values():
            gate.close()
        self._listener.close()
        if self._counters:
            self._counters.close()
        self.box.end()
        sandbox.remove(self._work)

    _said: Sequence[float] | None = None

    def _sent(self) -> list[float]:
        if self._counters is None:
            return list(self._said or [0.0] * self.ranks)
        return _received(self._counters, self.ranks)

    def _look(self) -> None:
        self.box.take_output()
        if self.box.flooded:
            raise Flooded


def _listening(path: Path) -> socket.socket:
    """A socket at `path`, which may be longer than the hundred bytes that the address of one can have."""
    listener, folder = socket.socket(socket.AF_UNIX), os.open(path.parent, os.O_RDONLY)
    try:
        short = Path(f"/proc/self/fd/{folder}", path.name)
        listener.bind(str(short if short.parent.exists() else path))
    finally:
        os.close(folder)
    return listener


def _said(answer: dict) -> str:
    kind, text = str(answer.get("kind")), str(answer["fault"])
    return text if kind == "Fault" else f"{kind}: {text}"


def _open_counters(top: int, ranks: int) -> IO[str] | None:
    """The interfaces of the switch, seen from outside the sandbox: what comes out of v0 was sent by rank 0.

    The switch is the first process, seen from the top, in whose network namespace these interfaces are.
    """
    level = [top]
    while level:
        for pid in level:
            with contextlib.suppress(OSError):
                file = open(f"/proc/{pid}/net/dev")  # noqa: SIM115 - it stays open for the whole measurement
                if len(_received(file, ranks)) == ranks:
                    return file
                file.close()
        level = [child for pid in level for child in _children(pid)]
    return None


def _received(file: IO[str], ranks: int) -> list[float]:
    file.seek(0)
    found = {}
    for line in file.read().splitlines():
        name, _, counters = line.partition(":")
        if counters:
            found[name.strip()] = float(counters.split()[0])
    return [found[f"v{rank}"] for rank in range(ranks) if f"v{rank}" in found]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += [int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return found
