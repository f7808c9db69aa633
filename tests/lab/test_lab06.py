"""Exercises 6.1 to 6.3: right answers of several kinds pass, odd ones are told what is odd; the runs on ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.lab import CheckFailed, LabError, evaluate
from course_lib.lab.pictures.phase import phase
from course_lib.lab.pictures.side_by_side import side_by_side
from course_lib.lab.workbench.buckets import OwnRunFailed
from course_lib.lab.workbench.every import every_runs
from course_lib.lab.workbench.input_pipeline import input_runs, readers
from course_lib.link_cost import LinkCost
from course_lib.simulate.buckets import MB, GradientProfile, predict, uniform_plan
from course_lib.simulate.every_step import predict_every_step
from course_lib.tune.calibrate import Load

seeds = st.integers(0, 10**6)


class Alternating:
    """Even micro-steps add up in one buffer, odd ones in the other; there is no third tensor."""

    def __init__(self, wire):
        self.wire, self.flying = wire, {}

    def collect(self, b):
        if b in self.flying:
            self.flying.pop(b).wait()
            self.wire.buffers[b] /= self.wire.ranks

    def micro_step(self, i, gradient):
        self.collect(i % 2)
        if i < 2:
            self.wire.buffers[i % 2].zero_()
        self.wire.buffers[i % 2] += gradient
        self.flying[i % 2] = self.wire.launch(i % 2)

    def finish(self):
        used = list(self.flying)
        for b in used:
            self.collect(b)
        return sum(self.wire.buffers[b] for b in used)


class Listing:
    """Keeps what arrived in a list and adds it up at the end; its handles are a list too."""

    def __init__(self, wire):
        self.wire, self.handles, self.arrived = wire, [], []

    def collect(self, b):
        self.handles.pop(0).wait()
        self.arrived.append(self.wire.buffers[b].clone())

    def micro_step(self, i, gradient):
        if len(self.handles) == 2:
            self.collect(i % 2)
        self.wire.buffers[i % 2][:] = gradient
        self.handles.append(self.wire.launch(i % 2))
        self.last = i

    def finish(self):
        for i in range(self.last + 1 - len(self.handles), self.last + 1):
            self.collect(i % 2)
        mean = torch.stack(self.arrived).sum(0) / self.wire.ranks
        self.arrived = []
        return mean


class Asking(Alternating):
    """Looks whether the other buffer has arrived, and collects it early if so: nobody waits for that."""

    def __init__(self, wire):
        super().__init__(wire)
        self.total = torch.zeros_like(wire.buffers[0])

    def collect(self, b):
        if b in self.flying:
            self.flying.pop(b).wait()
            self.total += self.wire.buffers[b] / self.wire.ranks

    def micro_step(self, i, gradient):
        self.collect(i % 2)
        if 1 - i % 2 in self.flying and self.flying[1 - i % 2].is_completed():
            self.collect(1 - i % 2)
        self.wire.buffers[i % 2].copy_(gradient)
        self.flying[i % 2] = self.wire.launch(i % 2)

    def finish(self):
        for b in list(self.flying):
            while not self.flying[b].is_completed():
                pass
            self.collect(b)
        mean, self.total = self.total, torch.zeros_like(self.total)
        return mean


def by_events(N, Tf_s, Tb_s, ready_s, cost_s, every):
    """All buckets of all micro-steps in one list."""
    sending = range(N) if every else [N - 1]
    jobs = [(k * (Tf_s + Tb_s) + Tf_s + r, c) for k in sending for r, c in zip(ready_s, cost_s)]
    free = 0.0
    for ready, cost in jobs:
        free = max(ready, free) + cost
    return max(free, N * (Tf_s + Tb_s))


def by_latest(N, Tf_s, Tb_s, ready_s, cost_s, every):
    """No loop over time: the latest of "this bucket is ready, and everything after it follows"."""
    micro, ends = Tf_s + Tb_s, [N * (Tf_s + Tb_s)]
    for k in range(N) if every else [N - 1]:
        for j, ready in enumerate(ready_s):
            ends.append(k * micro + Tf_s + ready + sum(cost_s[j:]) + (N - 1 - k) * sum(cost_s))
    return max(ends)


def in_turn(batches, bus, compute):
    results, last = [], None
    for coming in (bus.copy(bus.pin(batch)) for batch in batches):
        if last:
            last.wait()
            results += [compute(last.data)]
        last = coming
    if last:
        last.wait()
        results += [compute(last.data)]
    return results


def as_generator(batches, bus, compute):
    def ahead():
        before = None
        for batch in batches:
            coming = bus.copy(bus.pin(batch))
            if before is not None:
                yield before
            before = coming
        if before is not None:
            yield before

    def computed():
        for one in ahead():
            one.wait()
            yield compute(one.data)

    return tuple(computed())


@settings(max_examples=10, deadline=None)
@given(seeds)
@pytest.mark.parametrize(("number", "answer"), [("6.1", Alternating), ("6.1", Listing), ("6.1", Asking),
                                                 ("6.2", by_events), ("6.2", by_latest), ("6.3", in_turn),
                                                 ("6.3", as_generator)])
def test_right_answers_pass_whatever_is_drawn(number: str, answer, seed: int) -> None:
    result = evaluate(number, answer, seed=seed)
    assert result.ok, [row for row in result.rows if not row.ok]


def with_method(name, body):
    return type("DoubleBuffer", (Listing,), {name: body})


@pytest.mark.parametrize(("number", "answer", "seen"), [
    ("6.1", type("DoubleBuffer", (), {"collect": Listing.collect}), "has no method `micro_step`"),
    ("6.1", with_method("micro_step", lambda self, i, gradient: 1 / 0), "raised ZeroDivisionError"),
    ("6.1", with_method("micro_step", lambda self, i, gradient: self.wire.launch(2)), "launch takes the number"),
    ("6.1", with_method("finish", lambda self: None), "finish() returned None"),
    ("6.1", with_method("finish", lambda self: 3.0), "finish() returned a float"),
    ("6.2", lambda *arguments: None, "gave None"),
    ("6.2", lambda *arguments: [1.0], "gave [1.0]"),
    ("6.2", lambda N: 1.0, "raised TypeError"),
    ("6.3", lambda batches, bus, compute: None, "gave None"),
    ("6.3", lambda batches, bus, compute: [compute(batch) for batch in batches], "compute takes the `data` of a copy"),
    ("6.3", lambda batches, bus, compute: [bus.copy(3.0)], "copy takes a batch"),
])
def test_odd_answers(number: str, answer, seen: str) -> None:
    result = evaluate(number, answer, seed=0)
    assert not result.ok and seen in " ".join(row.seen for row in result.rows if not row.ok)


def test_a_class_that_never_launches_is_told_which_rule_it_breaks() -> None:
    result = evaluate("6.1", with_method("micro_step", lambda self, i, g: setattr(self, "last", -1)
                                         or self.arrived.append(g)), seed=0)
    assert next(row.name for row in result.rows if not row.ok) == "every micro-step leaves in its call"


@pytest.mark.parametrize("number", ["6.2", "6.3"])
def test_stubs_say_so(number: str) -> None:
    def stub(*arguments):
        raise NotImplementedError("exercise")

    with pytest.raises(CheckFailed, match=f"exercise {number} is not written yet"):
        evaluate(number, stub)


# on ranks

LOAD = Load("equal", 4, 0.04, 2.0, 4.0, 0.7, LinkCost(0.001, 8e-9))


def test_the_learners_buffers_on_ranks_beside_the_librarys() -> None:
    found = every_runs(LOAD, Listing, 3, bucket_mb=0.02, fabric="paced", repeats=2)
    assert list(found) == ["yours", "once", "EveryStep", "DDP every", "serial"]
    assert all(one.from_reference < 1e-5 for one in found.values()), found
    assert [one.collectives for one in found.values()] == [6, 2, 6, 6, 1]
    assert found["yours"].bytes == found["EveryStep"].bytes == 3 * found["once"].bytes == 3 * found["serial"].bytes
    assert found["yours"].overlap > found["once"].overlap


def test_what_goes_wrong_on_a_rank_is_one_sentence() -> None:
    with pytest.raises(OwnRunFailed, match=r"rank \d: micro_step\(0, gradient\) raised ZeroDivisionError"):
        every_runs(LOAD, with_method("micro_step", lambda self, i, g: 1 / 0), 2, fabric="paced", repeats=2)
    with pytest.raises(LabError, match=r"the class of exercise 6\.1"):
        every_runs(LOAD, Listing(None), 2)


# the input pipeline and the pictures


def test_feeding_from_pageable_memory_overlaps_nothing_and_reading_early_reads_something_else() -> None:
    found = input_runs(in_turn, batches=6)
    yours, pageable, early = found.values()
    assert yours.wrong == pageable.wrong == 0 and early.wrong > 0
    assert pageable.ms >= 6 * (14 + 12) and yours.ms < 0.9 * pageable.ms
    with pytest.raises(OwnRunFailed, match="ZeroDivisionError"):
        input_runs(lambda batches, bus, compute: 1 / 0, batches=2)


def test_every_reader_gives_the_same_batches() -> None:
    found = readers(batches=6)
    assert list(found) == ["in the loop", "Prefetch", "DataLoader, 2 workers"]
    assert all(epoch.wrong == 0 and epoch.ms >= 6 * 12 for epoch in found.values())
    assert found["in the loop"].ms >= 6 * (10 + 12) and found["Prefetch"].ms < 0.95 * found["in the loop"].ms


def test_the_map_and_the_two_schedules_are_drawn() -> None:
    for dark in (False, True):
        drawn = phase(lambda gbit, N: max(0, 1 - gbit) * N / 4, [0.25, 0.5, 1, 2], [1, 2, 4],
                      {(0.5, 2): 0.2, (2, 4): 0}, mark=1, dark=dark)
        assert "0.5 Gbit/s, N = 2: +20%; 2 Gbit/s, N = 4: 0%" in drawn.words and drawn.png()[:4] == b"\x89PNG"
        profile = GradientProfile(["b", "a"], [MB, MB], [0.01, 0.02], 0.01, 0.02, N=2)
        plan, link = uniform_plan(profile, MB), LinkCost(0, 2e-8)
        both = side_by_side({"once": predict(profile, link, plan).timeline,
                             "every": predict_every_step(profile, link, plan).timeline}, dark=dark)
        assert "once: step" in both.words and "every: step" in both.words and both.png()[:4] == b"\x89PNG"
    with pytest.raises(LabError, match="measured point"):
        phase(lambda gbit, N: 0, [1], [1], {}, mark=1)
    with pytest.raises(LabError, match="at least one timeline"):
        side_by_side({})
