"""Pipelines on real ranks: the gradients are those of one process, whatever the schedule."""

from __future__ import annotations

import pytest
import torch

from course_lib import launch
from tests.schedule.pipes import KINDS, MAKERS, gradients_of_a_pipeline, truth


def several(cases):
    return [gradients_of_a_pipeline(*case) for case in cases]


def compare(found, case, ranks: int) -> None:
    name, kind, m, replicas, passes, *_ = (*case, 1, 1)[:5] if len(case) < 5 else case
    p = ranks // replicas
    stages = MAKERS[name](p, m).stages
    loss, expected = truth(kind, stages, list(range(m * replicas * passes)))
    assert sum(share for share, _ in found) == pytest.approx(loss, rel=1e-5)
    for _, own in found:
        for stage, grads in own.items():
            torch.testing.assert_close(grads, expected[stage], rtol=1e-4, atol=1e-6, msg=f"{case}, stage {stage}")
    assert sorted(s for _, own in found[:p] for s in own) == list(range(stages))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gradients_are_those_of_one_process(ranks: int) -> None:
    cases = [(name, kind, m) for name in MAKERS for kind in KINDS for m in ((3, 5) if ranks < 4 else (6,))]
    found = launch.run(several, cases, ranks=ranks, fabric="loopback", timeout_s=90)
    for k, case in enumerate(cases):
        compare([own[k] for own in found], case, ranks)


def test_replicas_and_outer_accumulation() -> None:
    cases = [("zero bubble", "mlp", 3, 2, 1, 2), ("1f1b", "gpt", 2, 2, 2, 1), ("zb-v", "mlp", 3, 2, 2, 3),
             ("interleaved", "gpt", 3, 2, 1, 2)]
    found = launch.run(several, cases, ranks=4, fabric="loopback", timeout_s=90)
    for k, case in enumerate(cases):
        compare([own[k] for own in found], case, 4)
