"""Exercises 12.1 to 12.3: right answers of several kinds pass, odd ones are told what is odd; the runs on ranks."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.lab import CheckFailed, LabError, checking, evaluate
from course_lib.lab.pictures.held_above import held_above
from course_lib.lab.pictures.schedules_widget import explore_schedules
from course_lib.lab.workbench.buckets import OwnRunFailed
from course_lib.lab.workbench.held import LAYERS, PARAMETERS, UNIT_BYTES, WIDTH, held_runs
from course_lib.lab.workbench.zero import STAGES, label, zero_runs
from course_lib.lab.workbench.zero_held import held_bytes
from course_lib.lab.workbench.zero_step import step_runs
from course_lib.launch import Fabric
from course_lib.link_cost import LinkCost
from course_lib.plan.memory import FP32, states
from course_lib.simulate.zero import Units, predict_zero

seeds = st.integers(0, 10**6)
MB = 2**20


class CopiesBack:
    """A parameter of its own, the norm by a list of squares, clipping in place."""

    def __init__(self, flat, wire, make_optimizer):
        self.wire, self.flat = wire, flat
        n = flat.numel()
        sizes = [n // wire.ranks + (r < n % wire.ranks) for r in range(wire.ranks)]
        self.low = sum(sizes[:wire.rank])
        self.high = self.low + sizes[wire.rank]
        self.shard = torch.nn.Parameter(flat[self.low:self.high].clone())
        self.optimizer = make_optimizer(iter([self.shard]))

    def step(self, gradient, max_norm):
        mine = gradient[self.low:self.high].clone()
        total = torch.tensor([sum(g * g for g in mine.tolist())])
        self.wire.all_reduce(total)
        norm = float(total) ** 0.5
        if norm > max_norm:
            mine.mul_(max_norm / norm)
        self.optimizer.zero_grad()
        self.shard.grad = mine
        self.optimizer.step()
        self.flat[self.low:self.high] = self.shard.detach()
        self.wire.all_gather(self.flat)


class InTurn:
    """At most one bucket on its way; the part lies in the whole; nothing is allocated but by pad."""

    def __init__(self, sizes, wire):
        self.sizes, self.wire, self.before = sizes, wire, None
        self.kept = [torch.zeros(-(-size // wire.ranks)) for size in sizes]

    def bucket_full(self, b, gradient):
        self.end_of_backward()
        n = self.wire.ranks
        whole = torch.nn.functional.pad(gradient, (0, -len(gradient) % n))
        self.before = b, whole.view(n, -1)[self.wire.rank], None
        self.before = *self.before[:2], self.wire.reduce_scatter(self.before[1], whole)

    def end_of_backward(self):
        if self.before is not None:
            b, part, handle = self.before
            handle.wait()
            self.kept[b].add_(part)
            self.before = None

    def finish(self):
        n, out = self.wire.ranks, []
        for kept, size in zip(self.kept, self.sizes):
            padded = torch.arange(len(kept) * n).view(n, -1)[self.wire.rank]
            out.append(kept[padded < size] / n)
            kept.zero_()
        return tuple(out)


class DividesFirst:
    """Divides before sending, and sends what it was given where nothing has to be added."""

    def __init__(self, sizes, wire):
        self.sizes, self.wire, self.flying, self.sums = sizes, wire, deque(), [None] * len(sizes)

    def bucket_full(self, b, gradient):
        gradient /= self.wire.ranks
        k = (len(gradient) + self.wire.ranks - 1) // self.wire.ranks
        if extra := k * self.wire.ranks - len(gradient):
            gradient = torch.cat((gradient, torch.zeros(extra)))
        part = torch.zeros(k)
        self.flying.append((b, part, self.wire.reduce_scatter(part, gradient)))

    def end_of_backward(self):
        while self.flying:
            b, part, handle = self.flying.popleft()
            handle.wait()
            self.sums[b] = part if self.sums[b] is None else self.sums[b] + part

    def finish(self):
        out, self.sums = self.sums, [None] * len(self.sizes)
        low = [self.wire.rank * len(part) for part in out]
        return [part[:max(0, size - start)] for part, size, start in zip(out, self.sizes, low)]


def with_a_queue(order, wire, compute, ahead):
    """A generator that runs ahead of its consumer."""
    def gathers():
        handles = {}
        for u in order:
            if u not in handles:
                handles[u] = wire.gather(u)
            yield handles[u]

    coming, ready = gathers(), deque()
    for i, u in enumerate(order):
        while len(ready) <= ahead and (handle := next(coming, None)) is not None:
            ready.append(handle)
        ready.popleft().wait()
        compute(u)
        if u not in order[i + 1:]:
            wire.free(u)


def by_counting(order, wire, compute, ahead=1):
    uses, handles = {u: order.count(u) for u in order}, {}
    for i in range(len(order)):
        for u in order[i:min(len(order), i + ahead + 1)]:
            handles[u] = handles.get(u) or wire.gather(u)
        handles[order[i]].wait()
        compute(order[i])
        uses[order[i]] -= 1
        if not uses[order[i]]:
            wire.free(order[i])


@settings(max_examples=4, deadline=None)
@given(seeds)
@pytest.mark.parametrize(("number", "answer"), [
    ("12.1", CopiesBack), ("12.2", InTurn), ("12.2", DividesFirst), ("12.3", with_a_queue), ("12.3", by_counting)])
def test_right_answers_pass_whatever_is_drawn(number: str, answer, seed: int) -> None:
    result = evaluate(number, answer, seed=seed)
    assert result.ok, [row for row in result.rows if not row.ok]


def with_methods(**methods) -> type:
    """A class whose constructor takes anything."""
    return type("Odd", (), {"__init__": lambda self, *given: setattr(self, "given", given), **methods})


@pytest.mark.parametrize(("number", "answer", "seen"), [
    ("12.1", with_methods(), "no method `step`"),
    ("12.1", with_methods(step=lambda self, gradient, max_norm: 1 / 0), "raised ZeroDivisionError"),
    ("12.1", with_methods(step=lambda self, *given: None), "in one process"),
    ("12.1", with_methods(step=lambda self, *given: self.given[1].all_gather(3.0)), "takes a 1-D tensor"),
    ("12.2", with_methods(bucket_full=lambda self, b, gradient: None), "no method `end_of_backward`"),
    ("12.2", with_methods(bucket_full=lambda self, b, gradient: self.given[1].reduce_scatter(3, gradient),
                          end_of_backward=lambda self: None, finish=lambda self: []), "takes two 1-D tensors"),
    ("12.2", with_methods(bucket_full=lambda self, b, gradient: None, end_of_backward=lambda self: None,
                          finish=lambda self: None), "this was None"),
    ("12.2", with_methods(bucket_full=lambda self, b, gradient: None, end_of_backward=lambda self: None,
                          finish=lambda self: [1.0] * len(self.given[0])), "one of them was a float"),
    ("12.3", lambda *given: None, "computed []"),
    ("12.3", lambda order, wire, compute, ahead: wire.gather(99), "the units of this pass are"),
    ("12.3", lambda order, wire, compute, ahead: (wire.gather(order[0]), wire.free(order[0])), "still written to"),
    ("12.3", lambda order, wire, compute, ahead: [wire.gather(order[0]) for _ in range(99)], "every unit needs one"),
    ("12.3", lambda order, wire, compute: None, "raised TypeError"),
])
def test_odd_answers(number: str, answer, seen: str) -> None:
    result = evaluate(number, answer, seed=0)
    assert not result.ok and seen in " ".join(row.seen for row in result.rows if not row.ok)


def endless(*given) -> None:
    while True:
        pass


@pytest.mark.parametrize(("number", "answer"), [
    ("12.1", with_methods(step=endless)), ("12.3", endless),
    ("12.2", with_methods(bucket_full=endless, end_of_backward=endless, finish=endless))])
def test_an_endless_loop_ends(number: str, answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "SECONDS", 0.3)
    assert "it was still running" in evaluate(number, answer, seed=0).rows[0].seen


def stub(*given):
    raise NotImplementedError("exercise")


@pytest.mark.parametrize(("number", "answer"), [
    ("12.1", type("Stub", (), {"__init__": stub, "step": stub})),
    ("12.2", with_methods(bucket_full=stub, end_of_backward=stub, finish=stub)), ("12.3", stub)])
def test_stubs_say_so(number: str, answer) -> None:
    with pytest.raises(CheckFailed, match=f"exercise {number} is not written yet"):
        evaluate(number, answer)


# on ranks


@pytest.mark.slow
def test_the_learners_optimizer_on_ranks() -> None:
    found = step_runs(CopiesBack)
    yours, library, theirs, by_shard = found.ways
    assert max(way.apart for way in (yours, library, theirs)) < 1e-5 < 1e-3 < by_shard.apart
    assert yours.state == library.state == -(-yours.parameters // 2) and theirs.state < yours.parameters
    assert [said.split(";")[0][:20] for said in found.refused.values()] == [
        "this AdamW holds the", "the parameters are s", "window 1: the ranks "]


def test_what_goes_wrong_on_a_rank_is_one_sentence() -> None:
    with pytest.raises(OwnRunFailed, match=r"rank \d: step\(gradient, max_norm\) raised ZeroDivisionError"):
        step_runs(type("Wrong", (CopiesBack,), {"step": lambda self, *given: 1 / 0}))


TINY = {"N": 2, "count": 3, "mb": 0.25, "fabric": Fabric(gbit=1.0, latency_us=100, kind="paced"), "repeats": 2}


def never_frees(order, wire, compute, ahead):
    for u in order:
        wire.gather(u).wait()
        compute(u)


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "seen"), [
    (lambda order, wire, compute, ahead: [compute(u) for u in order], "computed with unit 0, whose parameters are not"),
    (never_frees, "with unit 0 still gathered"),
    (lambda order, wire, compute, ahead: with_a_queue(order[:-1], wire, compute, ahead), "left out unit 2 of the forw"),
])
def test_a_pass_that_goes_wrong_on_a_rank_is_one_sentence(answer, seen: str) -> None:
    with pytest.raises(OwnRunFailed, match=rf"rank \d: .*{seen}"):
        zero_runs(InTurn, answer, **TINY)


@pytest.mark.slow
def test_the_learners_stage_3_has_the_parameters_of_ddp() -> None:
    found = zero_runs(InTurn, by_counting, **TINY)
    stages = [label(*one) for one in STAGES]
    assert list(found.runs) == ["DDP", *stages, "yours", "one unit", "FSDP2", "starved, 0 ahead", "starved, 1 ahead",
                                "starved, 2 ahead"]
    assert all(one.from_ddp < 1e-5 for one in found.runs.values())
    half = 3 * 0.25 * MB / 2
    sent = {name: one.sent / half for name, one in found.runs.items()}
    assert sent["DDP"] == pytest.approx(2, rel=0.01) and sent["stage 1"] == pytest.approx(2, rel=0.01)
    assert sent["stage 2"] == pytest.approx(3, rel=0.01) and sent["yours"] == pytest.approx(6, rel=0.01)
    assert sent["stage 3, 1 ahead"] == pytest.approx(6 - 2 / 3, rel=0.01)
    assert found.runs["stage 3, 1 ahead"].exposed_s < found.runs["stage 3, 0 ahead"].exposed_s


@pytest.mark.slow
def test_what_each_stage_holds() -> None:
    """Parts are those of the planner, but that stage 1 has its part beside the whole; peaks fall with the stage, and
    no_sync adds the gradient's other parts."""
    held = held_runs((1, 8))
    for name, stage in (("DDP", 0), ("stage 2", 2), ("stage 3", 3), ("FSDP2", 3)):
        for N in (1, 8):
            parameters, gradients, optimizer = states(PARAMETERS, FP32, stage, 2)
            one = held[name, N]
            assert (one.parameters, one.optimizer) == pytest.approx((parameters, optimizer), rel=0.001)
            assert one.gradients == pytest.approx(gradients, rel=0.01), (name, N)
    assert held["stage 1", 1].gradients == pytest.approx(1.5 * 4 * PARAMETERS, rel=0.01)
    peaks = [held[name, 8].peak for name in ("DDP", "stage 1", "stage 2", "stage 3")]
    assert peaks == sorted(peaks, reverse=True)
    more = held["stage 3, no_sync", 8].peak - held["stage 3", 8].peak
    assert more >= 4 * PARAMETERS / 2 - 2 * UNIT_BYTES
    # Which of a unit's buffers and of a layer's two rows the wire's thread has let go by then differs from run to run.
    assert held["stage 3, no_sync", 1].peak <= held["stage 3", 1].peak + UNIT_BYTES + 2 * 4 * WIDTH
    for N in (1, 8):
        assert held["stage 3", N].sent == pytest.approx(N * (3 - 1 / LAYERS) * 4 * PARAMETERS / 2, rel=0.01)
        assert held["stage 3, no_sync", N].sent < held["stage 3", N].sent or N == 1


# the picture


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_picture_says_what_a_rank_holds(stage: int) -> None:
    units, ring = Units(4, MB, 0.004, 0.008), LinkCost(1e-4, 4e-9)
    kept = states(MB, FP32, stage, 4)
    held = held_bytes(units, 4, stage, ahead=1)
    whole = {1: (0, 0), 2: (0, 2 * MB), 3: (2 * MB, 2 * MB)}[stage]
    assert (held["parameters"], held["gradients"]) == (kept[0] + whole[0], kept[1] + whole[1])
    run = predict_zero(units, 2, ring, ring, stage)
    picture = held_above({"DDP": held_bytes(units, 4, 0), "this": held}, {"step": run.timeline}, dark=True)
    assert picture.png()[:4] == b"\x89PNG"
    assert picture.words.startswith("DDP holds 16.8 MB; this holds ") and "; step: step" in picture.words


def test_the_sliders_show_both_without_a_kernel() -> None:
    units, ring = Units(3, MB, 0.004, 0.008), LinkCost(1e-4, 4e-9)
    widget = explore_schedules(
        lambda stage, N: {f"stage {stage}": predict_zero(units, N, ring, ring, stage).timeline},
        {"stage": "stage", "N": "micro-steps"}, lambda stage, N: {"DDP": held_bytes(units, 4, 0),
                                                                  f"stage {stage}": held_bytes(units, 4, stage)},
        stage=(3, [1, 2, 3]), N=(1, [1, 2]))
    assert len(widget.data["runs"]) == 6 and set(widget.data["tints"]) == {"parameters", "gradients", "optimizer"}
    ddp, stage = widget.data["runs"]["0|1"]["held"]
    assert ddp["parts"] == [["parameters", 3 * MB], ["gradients", 3 * MB], ["optimizer", 6 * MB]]
    assert stage["name"] == widget.data["runs"]["0|1"]["schedules"][0]["name"] == "stage 1"
    assert "stage 3 holds" in widget.picture().words
    with pytest.raises(LabError, match="at least one bar"):
        held_above({}, {"one": predict_zero(units, 1, ring, ring, 1).timeline})
