"""Pipelines over NCCL: gradients of one process, spans by CUDA events."""

from __future__ import annotations

import pytest

from course_lib.launch import run
from course_lib.launch.fabric import gpus
from course_lib.schedule import add_reductions, interleaved, one_f_one_b, zb_v, zero_bubble

pytestmark = pytest.mark.gpu


def needs(count: int):
    return pytest.mark.skipif(gpus() < count, reason=f"needs {count} CUDA devices, this machine shows {gpus()}")


def stages(n: int):
    import torch
    from torch import nn
    torch.manual_seed(n)
    return [nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 33)) for _ in range(n)]


def window(m: int):
    import torch
    return [(torch.randn(5, 33, generator=torch.Generator().manual_seed(i)),) for i in range(m)]


def pipeline_gradients(schedule):
    import torch
    import torch.distributed as dist

    from course_lib.record import recording
    from course_lib.schedule.execute import Pipeline
    every = stages(schedule.stages)
    mine = {s: every[s].cuda() for s in schedule.stages_of(dist.get_rank())}
    pipeline = Pipeline(schedule, mine, lambda output, _: output.square().sum())
    batches = [(x.cuda(),) for (x,) in window(schedule.micro_batches)]
    with recording(dist.get_rank(), "measured (cuda)") as recorder:
        loss = pipeline.run(batches, 7)
    torch.cuda.synchronize()
    names = [s.name for s in recorder.timeline().select(kind="compute")]
    return loss, {s: [p.grad.cpu() for p in module.parameters()] for s, module in mine.items()}, names


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=needs(n)) for n in (1, 2, 4)])
@pytest.mark.parametrize("make", [one_f_one_b, zero_bubble, zb_v, lambda p, m: interleaved(p, m, 2),
                                  lambda p, m: add_reductions(one_f_one_b(p, m))])
def test_gradients_are_those_of_one_process(ranks, make):
    import torch
    from torch import nn
    schedule = make(ranks, 2 * ranks)
    alone = stages(schedule.stages)
    loss = sum(nn.Sequential(*alone)(x).square().sum() for (x,) in window(2 * ranks)) / 7
    loss.backward()
    found = run(pipeline_gradients, schedule, ranks=ranks, fabric="nccl")
    assert sum(share for share, _, _ in found) == pytest.approx(float(loss), rel=1e-4)
    for rank, (_, of_stages, names) in enumerate(found):
        compute = [schedule.name(a) for a in schedule.ranks[rank] if a.op.value in "FBIW"]
        assert names == compute
        for s, grads in of_stages.items():
            torch.testing.assert_close(grads, [p.grad for p in alone[s].parameters()], rtol=1e-3, atol=1e-4)
