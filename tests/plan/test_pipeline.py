"""The replayed pipeline: equal to the formula, equal to a replay of every GPU, and affordable for 16,384."""

from __future__ import annotations

import pytest

from course_lib.plan import Impossible, Layout, cluster, model, step
from course_lib.plan.pipeline import replay
from course_lib.plan.timing import stage_of

SMALL = model("layers=8,width=1024,heads=16,vocab=50368")


@pytest.mark.parametrize("layout", [Layout(1, 2), Layout(2, 4), Layout(1, 4, 2, 2, stage=1), Layout(8, 1),
                                    Layout(2, 2, stage=2)])
def test_the_formula_and_the_replay_agree(layout: Layout) -> None:
    where = cluster("a100-80", 16)
    assert replay(SMALL, where, layout, 64).total == pytest.approx(step(SMALL, where, layout, 64).total, rel=1e-6)


def test_one_member_of_each_class_stands_for_all() -> None:
    """Every GPU replayed by itself, without classes: each waits for its own neighbours in its own copy of the model."""
    where, layout = cluster("a100-80", 16), Layout(2, 4)
    found = replay(SMALL, where, layout, 16)
    N, p = found.step.N, 4
    ended: dict[tuple[int, int, str, int], float] = {}
    for copy in range(4):  # 2 tensor-parallel ranks × D = 2
        free = [0.0] * p
        todo = {s: ["F"] * (p - 1 - s) + ["F", "B"] * (N - (p - 1 - s)) + ["B"] * (p - 1 - s) for s in range(p)}
        count = {(s, k): 0 for s in range(p) for k in "FB"}
        while any(todo.values()):
            for s in range(p):
                while todo[s]:
                    kind = todo[s][0]
                    i = count[s, kind]
                    before = s - 1 if kind == "F" else s + 1
                    if 0 <= before < p and (copy, before, kind, i) not in ended:
                        break
                    one = stage_of(SMALL, where, layout, last=s == p - 1)
                    takes = (one.forward + one.tensor_forward if kind == "F" else one.backward + one.tensor_backward)
                    start = max(free[s], ended.get((copy, before, kind, i), 0.0))
                    free[s] = ended[copy, s, kind, i] = start + takes + one.hop
                    count[s, kind] += 1
                    todo[s].pop(0)
    assert found.members == 4
    assert found.pipeline.step_s == pytest.approx(max(ended.values()), rel=1e-6)


def test_16384_gpus_are_16_classes() -> None:
    where = cluster("h100", 16384)
    found = replay(model("175B"), where, Layout(8, 16, 1, stage=1), 4096)
    assert found.members == 1024 and len(found.pipeline.timeline.ranks) == 16
    spans = [s for s in found.pipeline.timeline if s.kind == "compute"]
    assert len(spans) == 16 * 2 * found.step.N  # and not 16,384 · 2 · N
    assert found.pipeline.timeline.provenance == "simulated"


def test_a_layout_that_cannot_be_is_refused() -> None:
    with pytest.raises(Impossible, match="pipeline stages"):
        replay(SMALL, cluster("a100-80", 16), Layout(1, 16), 64)
