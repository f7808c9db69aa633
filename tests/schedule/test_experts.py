"""Experts on different ranks: gradients against one process, and what travels under what."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib import launch
from course_lib.schedule import ScheduleError, breadth_first, check, gpipe, interleaved, split_backward
from course_lib.schedule.execute import Pipeline
from course_lib.schedule.experts import exchange_over
from course_lib.simulate.pipeline import Costs, predict

WIDTH, ROWS, M = 5, 4, 3


def part(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))


def batch(rank: int, i: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * rank + i))


def on_a_rank() -> dict:
    rank, alone = dist.get_rank(), [dist.new_group([r]) for r in range(2)][dist.get_rank()]
    swap, out = exchange_over(dist.group.WORLD), {}
    for name, schedule in {"breadth": breadth_first(1, M, 3), "depth": interleaved(1, M, 3),
                           "split": split_backward(breadth_first(1, M, 3))}.items():
        stages = {0: part(0), 1: part(1 + rank), 2: part(3)}
        pipeline = Pipeline(schedule, stages, lambda y, _: y.square().sum(), group=alone, exchange={0: swap, 1: swap})
        loss = pipeline.run([(batch(rank, i),) for i in range(M)], 2 * M)
        out[name] = loss, {s: [p.grad for p in module.parameters()] for s, module in stages.items()}
    with pytest.raises(ValueError, match="3 rows cannot go to 2 ranks"):
        swap(torch.ones(3))
    with pytest.raises(ScheduleError, match=r"exchange\[2\] is between stages 2 and 3, which are not both on rank 0"):
        Pipeline(gpipe(1, 2), {0: part(0)}, lambda y, _: y.sum(), group=alone, exchange={2: swap})
    return out


def test_gradients_are_those_of_one_process_that_holds_all_experts() -> None:
    first, experts, last = part(0), [part(1), part(2)], part(3)
    loss = torch.zeros(())
    for i in range(M):
        halves = [first(batch(rank, i)).chunk(2) for rank in range(2)]
        loss = loss + sum(last(torch.cat([experts[k](halves[rank][k]) for k in range(2)])).square().sum()
                          for rank in range(2)) / (2 * M)
    loss.backward()

    def grads(module: nn.Module) -> list[torch.Tensor]:
        return [p.grad for p in module.parameters()]

    found = launch.run(on_a_rank, ranks=2, fabric="loopback", timeout_s=60)
    for name in found[0]:
        torch.testing.assert_close(sum(own[name][0] for own in found), float(loss.detach()), rtol=1e-5, atol=1e-6)
        for rank, own in enumerate(found):
            torch.testing.assert_close(own[name][1][1], grads(experts[rank]), rtol=1e-5, atol=1e-6)
        for stage, whole in ((0, first), (2, last)):
            summed = [a + b for a, b in zip(found[0][name][1][stage], found[1][name][1][stage])]
            torch.testing.assert_close(summed, grads(whole), rtol=1e-5, atol=1e-6)


def test_exchanges_travel_under_the_compute_of_other_micro_batches() -> None:
    costs = Costs(F=0.010, B=0.020, exchange=0.008)
    wide, deep = (predict(make(1, 4, 3), costs) for make in (breadth_first, interleaved))
    assert [wide.step_s, deep.step_s] == pytest.approx([12 * 0.030, 12 * 0.030 + 4 * 0.008])
    sent = wide.timeline.select(kind="comm").spans
    assert len(sent) == 2 * 2 * 4 and all(a.stop <= b.start for a, b in pairwise(sent))
    one = predict(breadth_first(1, 1, 3), costs)
    assert one.step_s == pytest.approx(3 * 0.030 + 4 * 0.008), "one micro-batch has nothing to travel under"
    assert predict(breadth_first(2, 2, 2), Costs(F=0.01, B=0.01, exchange=1.0)).step_s < 1, "messages go between ranks"


@pytest.mark.parametrize(("p", "m", "v"), [(1, 3, 3), (2, 4, 2), (3, 2, 2)])
def test_breadth_first_runs_and_keeps_everything(p: int, m: int, v: int) -> None:
    made = breadth_first(p, m, v)
    assert check(made).peak_activations == (m * v,) * p
    assert breadth_first(p, m) == gpipe(p, m)
