"""Exercises 11.1 to 11.3: right answers of several kinds pass, odd ones are told what is odd; the runs on ranks."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import overlap
from course_lib.lab import CheckFailed, LabError, evaluate
from course_lib.lab.pictures.schedules_widget import ESM, explore_schedules, predicted
from course_lib.lab.workbench.buckets import OwnRunFailed
from course_lib.lab.workbench.tensor import layer_runs, pair_runs
from course_lib.lab.workbench.tensor_gpt import gpt_runs
from course_lib.launch import Fabric
from course_lib.link_cost import LinkCost
from course_lib.simulate.chunked import Operator, predict_chunked, step_s
from course_lib.timeline import union

seeds = st.integers(0, 10**6)
QUICK = Fabric(gbit=2.0, latency_us=100, kind="paced")


def by_products(x, p, wire):
    """No F.linear, positional ops, and the bias where nobody looks for it."""
    h = F.gelu(torch.einsum("...i,oi->...o", wire.cross(x, None, "all_reduce"), p.up) + p.up_bias)
    return p.down_bias + wire.cross(h @ p.down.t(), "all_reduce", None)


def in_halves(x, p, wire):
    """An all-reduce for each half of the rows: as many bytes."""
    out = []
    for part in wire.cross(x, backward="all_reduce").tensor_split(2, dim=-2):
        out.append(wire.cross(F.linear(F.gelu(F.linear(part, p.up, p.up_bias)), p.down), forward="all_reduce"))
    return torch.cat(out, dim=-2) + p.down_bias


class Plain:
    def __init__(self, p, wire):
        self.p, self.wire = p, wire

    def forward(self, x):
        p = self.p
        h = self.wire.cross(F.layer_norm(x, x.shape[-1:], p.norm_weight, p.norm_bias), "all_gather", "reduce_scatter")
        y = F.linear(F.gelu(F.linear(h, p.up, p.up_bias)), p.down)
        return x + self.wire.cross(y, "reduce_scatter", "all_gather") + p.down_bias

    def finish(self):
        for param in (self.p.norm_weight, self.p.norm_bias, self.p.down_bias):
            self.wire.all_reduce(param.grad)


class Crossing(Plain):
    """The whole parameters cross on their way in, so that nothing is left to finish."""

    def forward(self, x):
        whole = {name: self.wire.cross(getattr(self.p, name), None, "all_reduce")
                 for name in ("norm_weight", "norm_bias", "down_bias")}
        own, self.p = self.p, type(self.p)(**(vars(self.p) | whole))
        y = super().forward(x)
        self.p = own
        return y

    def finish(self):
        pass


class Flat(Plain):
    """One sum for all three."""

    def finish(self):
        grads = [self.p.down_bias.grad, self.p.norm_bias.grad, self.p.norm_weight.grad]
        flat = torch.cat(grads)
        self.wire.all_reduce(flat)
        for grad, part in zip(grads, flat.chunk(3)):
            grad.copy_(part)


def one_ahead(x, multiply, chunks, wire):
    first, *others = x.tensor_split(chunks)
    coming, products = wire.start_gather(first), []
    for part in others:
        arrived, coming = coming, wire.start_gather(part)
        products.append(multiply(arrived.wait()))
    return torch.cat([*products, multiply(coming.wait())], dim=1).flatten(0, 1)


def all_at_once(x, multiply, chunks, wire):
    handles = [wire.start_gather(part) for part in x.chunk(chunks)]
    return torch.hstack([multiply(handle.wait()) for handle in handles]).view(wire.ranks * len(x), -1)


def into_place(x, multiply, chunks, wire):
    """A generator that is ahead, and rows written where they belong."""
    def arriving():
        ahead = None
        for start in range(0, len(x), -(-len(x) // chunks)):
            coming = start, wire.start_gather(x[start:start - (-len(x) // chunks)])
            if ahead:
                yield ahead
            ahead = coming
        yield ahead

    out = None
    for start, handle in arriving():
        product = multiply(handle.wait())
        out = product.new_empty(wire.ranks, len(x), product.shape[-1]) if out is None else out
        out[:, start:start + product.shape[1]] = product
    return out.flatten(0, 1)


@settings(max_examples=3, deadline=None)
@given(seeds)
@pytest.mark.parametrize(("number", "answer"), [
    ("11.1", by_products), ("11.1", in_halves), ("11.2", Plain), ("11.2", Crossing), ("11.2", Flat),
    ("11.3", one_ahead), ("11.3", all_at_once), ("11.3", into_place)])
def test_right_answers_pass_whatever_is_drawn(number: str, answer, seed: int) -> None:
    result = evaluate(number, answer, seed=seed)
    assert result.ok, [row for row in result.rows if not row.ok]


def but(**methods) -> type:
    return type("SequenceParallelMLP", (Plain,), methods)


def looping(x, multiply, chunks, wire):
    while True:
        pass


@pytest.mark.parametrize(("number", "answer", "seen"), [
    ("11.1", lambda x, p, wire: 3.0, "gave 3.0"),
    ("11.1", lambda x, p, wire: F.linear(x, p.up), "gave a tensor of"),
    ("11.1", lambda x, p, wire: torch.zeros_like(x), "its backward pass never began"),
    ("11.1", lambda x, p, wire: wire.cross(x, "broadcast"), "not 'broadcast'"),
    ("11.1", lambda x, p, wire: wire.cross(3.0), "cross takes a tensor"),
    ("11.1", lambda x: x, "raised TypeError"),
    ("11.1", lambda x, p, wire: x.add_(1), "raised RuntimeError"),
    ("11.1", lambda x, p, wire: wire.cross(x, ("all_reduce", "all_gather")[wire.rank % 2]), "each as its collective 1"),
    ("11.2", type("SequenceParallelMLP", (), {"forward": 1}), "has no method `forward`"),
    ("11.2", but(forward=lambda self, x: self.wire.cross(x, "all_gather")), "gave a tensor of"),
    ("11.2", but(finish=lambda self: 1 / 0), "finish() on rank 0 of 2 raised ZeroDivisionError"),
    ("11.2", but(finish=lambda self: self.wire.all_reduce(None)), "all_reduce takes a tensor"),
    ("11.3", lambda x, multiply, chunks, wire: 3, "gave 3"),
    ("11.3", lambda x, multiply, chunks, wire: wire.start_gather(x[0]), "start_gather takes rows"),
    ("11.3", lambda x, multiply, chunks, wire: multiply(None), "multiply takes a tensor"),
])
def test_odd_answers(number: str, answer, seen: str) -> None:
    result = evaluate(number, answer, seed=0)
    assert not result.ok and seen in " ".join(row.seen for row in result.rows if not row.ok)


@pytest.mark.parametrize("number", ["11.1", "11.2", "11.3"])
def test_stubs_say_so(number: str) -> None:
    def stub(*arguments):
        raise NotImplementedError("exercise")

    with pytest.raises(CheckFailed, match=f"exercise {number} is not written yet"):
        evaluate(number, but(forward=stub) if number == "11.2" else stub)


def test_a_rank_that_waits_for_ever_is_told_for_whom() -> None:
    def half(x, p, wire):
        return by_products(x, p, wire) if wire.rank == 0 else F.linear(F.gelu(F.linear(x, p.up)), p.down)

    result = evaluate("11.1", half, seed=0)
    assert "rank 0 waits in its collective 1, all_reduce, for rank 1" in " ".join(row.seen for row in result.rows)


def test_an_endless_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("course_lib.lab.checking.SECONDS", 0.3)
    result = evaluate("11.3", looping, seed=0)
    assert [row.name for row in result.rows] == ["your code comes to an end"]


def test_what_is_late_is_told_apart_by_its_order() -> None:
    """An answer that is right in numbers fails for its order alone, and the row says how late it was."""
    def late(x, multiply, chunks, wire):
        parts = [multiply(wire.start_gather(part).wait()) for part in x.tensor_split(chunks)]
        return torch.cat(parts, dim=1).flatten(0, 1)

    failed = [row for row in evaluate("11.3", late, seed=3).rows if not row.ok]
    assert [row.name for row in failed] == ["the next chunk travels while one is multiplied"]
    assert "start wait multiply start wait multiply" in failed[0].seen and "with one gather ahead" in failed[0].seen


# on ranks


def test_the_learners_pairs_in_a_gpt_have_the_gradients_of_one_process() -> None:
    found = gpt_runs(by_products, Plain, ranks=2, fabric=QUICK)
    assert list(found) == ["one process", "your pair", "your sequence-parallel pair", "tensor", "sequence"]
    assert all(way.loss_off < 1e-5 and way.from_one_process < 1e-4 for way in found.values()), found
    one, pair, cut, tensor, sequence = found.values()
    assert one.sent_mb == 0 and pair.calls == tensor.calls and pair.sent_mb == tensor.sent_mb
    assert cut.sent_mb == pytest.approx(sequence.sent_mb)
    assert [round(16 * way.kept_mb / one.kept_mb) for way in (one, pair, cut, tensor, sequence)] == [16, 10, 9, 10, 9]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_other_degrees_and_pytorchs_twins(ranks: int) -> None:
    found = gpt_runs(in_halves, Flat, twins=True, ranks=ranks, fabric=QUICK)
    assert list(found)[-2:] == ["DTensor", "DTensor, sequence"]
    assert all(way.loss_off < 1e-5 and way.from_one_process < 1e-4 for way in found.values()), found


@pytest.mark.slow
def test_unfinished_gradients_are_those_of_what_every_rank_holds() -> None:
    unfinished = gpt_runs(sequence=Plain, finish=False, ranks=2, fabric=QUICK)["your sequence-parallel pair"]
    wrong = {name for name, off in unfinished.worst.items() if off > 1e-3}
    assert wrong == {name for name in unfinished.worst
                     if "norm" in name or name == "position.weight" or name.endswith(("out.bias", "down.bias"))}


def test_what_goes_wrong_on_a_rank_is_one_sentence() -> None:
    with pytest.raises(OwnRunFailed, match=r"rank \d: parallel_mlp\(x, p, wire\) raised ZeroDivisionError"):
        gpt_runs(lambda x, p, wire: 1 / 0, ranks=2, fabric=QUICK)
    with pytest.raises(OwnRunFailed, match=r"rank \d: mine returned 3, not a tensor"):
        layer_runs({"mine": lambda x, multiply, wire: 3}, mb=0.25, ranks=2, fabric=QUICK, repeats=2)


@pytest.mark.slow
def test_chunks_are_timed_beside_what_waits() -> None:
    wire = Fabric(gbit=0.5, latency_us=200, kind="paced")
    ways = {str(k): lambda x, multiply, wire, k=k: one_ahead(x, multiply, k, wire) for k in (1, 4)}
    found = layer_runs(ways, shards=True, mb=4, ranks=2, fabric=wire, repeats=4)
    assert all(way.from_reference == 0 for way in found.measured.values())
    assert found["4"].median_s < 0.85 * found["1"].median_s and found["4"].exposed_s < 0.5 * found["1"].exposed_s
    pair = pair_runs((1, 4), mb=2, ranks=2, fabric=wire, repeats=3)
    assert all(way.from_reference < 1e-5 for way in pair.measured.values())
    waiting, whole, chunks = (pair[name].exposed_s for name in ("waiting", "1 chunk", "4 chunks"))
    assert chunks < 0.6 * waiting and whole < waiting


# the sliders

LABELS, STOPS = {"chunks": "chunks", "gbit": "link, Gbit/s"}, {"chunks": [1, 4], "gbit": [0.5, 1.0]}


def drawn(chunks, gbit):
    row = [Operator(kind, 0.01, 1e6, LinkCost(1e-4, 8e-9 / gbit)) for kind in ("gather", "scatter")]
    return {"waiting": predict_chunked(row, None), "in chunks": predict_chunked(row, chunks)}


def test_the_browser_draws_what_is_predicted(tmp_path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: JavaScript cannot be compared with Python")
    (tmp_path / "widget.mjs").write_text(ESM.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "data.json").write_text(json.dumps(predicted(drawn, LABELS, STOPS)))
    (tmp_path / "run.mjs").write_text("""import * as w from "./widget.mjs"; import { readFileSync } from "node:fs";
        const d = JSON.parse(readFileSync("data.json")), out = [];
        for (const chunks of d.controls[0].stops) for (const gbit of d.controls[1].stops) {
          const run = d.runs[w.key(d.controls, { chunks, gbit })];
          out.push([chunks, gbit, run.schedules.map((s) => [w.said(s), s.lanes.map((l) => w.pieces(l, run.unit))])]);
        }
        console.log(JSON.stringify([out, w.ticks(83e6), d.looks.map((look) => look.words)]));""")
    done = subprocess.run([node, "run.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    out, ticks, looks = json.loads(done.stdout)
    assert ticks == [20e6 * k for k in range(5)] and looks[:3] == ["compute", "hidden communication",
                                                                   "exposed communication"]
    for chunks, gbit, schedules in out:
        for (said, lanes), (name, timeline) in zip(schedules, drawn(chunks, gbit).items()):
            found = overlap.report(timeline).pooled
            assert said == f"{name}: step {step_s(timeline) * 1e3:.2f} ms, exposed {found.exposed / 1e6:.2f} ms"
            for lane, kind in zip(lanes, ("compute", "comm")):
                covered = sum(b - a for a, b in union(timeline.select(kind=kind).intervals()))
                assert sum(piece["length"] for piece in lane) == pytest.approx(covered, rel=0.01)
            exposed = sum(piece["length"] for piece in lanes[1] if piece["look"] == 2)
            assert exposed == pytest.approx(found.exposed, rel=0.02, abs=2e4)


def test_the_widget_shows_its_picture_where_nothing_else_can_be_shown() -> None:
    pytest.importorskip("anywidget")
    widget = explore_schedules(drawn, LABELS, chunks=(1, [1, 4]), gbit=(0.5, [0.5, 1.0]))
    assert set(widget.data["runs"]) == {"0|0", "0|1", "1|0", "1|1"}
    before = widget.picture().words
    widget.at = widget.at | {"chunks": 4}
    assert before.startswith("waiting: step") and widget.picture().words != before
    with pytest.raises(LabError, match="none of its positions"):
        explore_schedules(drawn, LABELS, chunks=(2, [1, 4]), gbit=(0.5, [0.5]))
    with pytest.raises(LabError, match="has no label"):
        explore_schedules(drawn, {}, chunks=(1, [1]))
