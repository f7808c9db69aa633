"""Pipelines over NCCL: gradients of one process, spans by CUDA events; PP × TP × ZeRO."""

from __future__ import annotations

import pytest

from course_lib.launch import run
from course_lib.schedule import add_reductions, interleaved, one_f_one_b, zb_v, zero_bubble
from course_lib.schedule.degrees import Degrees
from tests.gpu.given import DEVICE, FABRIC, exact, moved, needs, on

pytestmark = pytest.mark.gpu


def stages(n: int):
    import torch
    from torch import nn
    torch.manual_seed(n)
    return [nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 33)) for _ in range(n)]


def window(m: int):
    import torch
    return [(torch.randn(5, 33, generator=torch.Generator().manual_seed(i)),) for i in range(m)]


def pipeline_gradients(schedule):
    import torch.distributed as dist

    from course_lib.record import recording
    from course_lib.schedule.execute import Pipeline
    exact()
    every = stages(schedule.stages)
    mine = {s: every[s].to(DEVICE) for s in schedule.stages_of(dist.get_rank())}
    pipeline = Pipeline(schedule, mine, lambda output, _: output.square().sum())
    batches = moved(window(schedule.micro_batches))
    with recording(dist.get_rank(), "measured (cuda)") as recorder:
        loss = pipeline.run(batches, 7)
    names = [s.name for s in recorder.timeline().select(kind="compute")]
    return float(loss), {s: [p.grad.cpu() for p in module.parameters()] for s, module in mine.items()}, names


@pytest.mark.parametrize("ranks", on(1, 2, 4, 8))
@pytest.mark.parametrize("make", [one_f_one_b, zero_bubble, zb_v, lambda p, m: interleaved(p, m, 2),
                                  lambda p, m: add_reductions(one_f_one_b(p, m))])
def test_gradients_are_those_of_one_process(ranks, make):
    import torch
    from torch import nn
    schedule = make(ranks, 2 * ranks)
    alone = stages(schedule.stages)
    loss = sum(nn.Sequential(*alone)(x).square().sum() for (x,) in window(2 * ranks)) / 7
    loss.backward()
    found = run(pipeline_gradients, schedule, ranks=ranks, fabric=FABRIC)
    assert sum(share for share, _, _ in found) == pytest.approx(float(loss), rel=1e-4)
    for rank, (_, of_stages, names) in enumerate(found):
        compute = [schedule.name(a) for a in schedule.ranks[rank] if a.op.value in "FBIW"]
        assert names == compute
        for s, grads in of_stages.items():
            torch.testing.assert_close(grads, [p.grad for p in alone[s].parameters()], rtol=1e-3, atol=1e-4)


def two_updates(degrees: Degrees, zero: bool, name: str):
    """As tests/schedule does them on the CPU: loss shares and whole parameters of this rank's stages, on a GPU."""
    import torch.distributed as dist

    from tests.schedule import test_joint_ranks as joint

    def cut(model, count, cpu=joint.cut):
        parts = cpu(model, count)
        for part in parts:
            if part.front:  # it counts its positions on the CPU
                part.front[1].register_forward_pre_hook(lambda module, given: moved(given))
        return parts

    exact()
    joint.make, joint.batch = (lambda cpu=joint.make: cpu().to(DEVICE)), lambda i, cpu=joint.batch: moved(cpu(i))
    joint.cut = cut
    shares, states, _, shard = joint.two_updates(degrees, zero, [name])[name]
    assert all(t.device.type == DEVICE for state in states.values() for t in state.values())
    return dist.get_rank(), [*map(float, shares)], moved(states, "cpu"), shard


@pytest.mark.parametrize(("degrees", "zero", "name"), [
    pytest.param(degrees, zero, name, marks=needs(degrees.ranks), id=f"{degrees.ranks}: {degrees}, {name}")
    for degrees in (Degrees(2, 1, 1), Degrees(1, 1, 2), Degrees(2, 1, 2), Degrees(1, 2, 2), Degrees(2, 2, 2))
    for zero in ((True, False) if degrees.data > 1 else (False,))
    for name in (("naive", "passes", "ZeRO-3", "greedy") if zero else ("replicas", "replicas, by bucket"))])
def test_two_updates_of_a_joint_pipeline_are_those_of_one_process(degrees: Degrees, zero: bool, name: str) -> None:
    import torch

    from tests.schedule.test_joint_ranks import V, reference
    losses, want = reference(degrees.data, degrees.pipeline * V)
    found = run(two_updates, degrees, zero, name, ranks=degrees.ranks, fabric=FABRIC)
    shares = torch.tensor([shares for _, shares, _, shard in found if shard == 0])
    torch.testing.assert_close(shares.sum(0), torch.tensor(losses), rtol=1e-4, atol=1e-5)
    for rank, _, states, _ in found:
        for stage, state in states.items():
            torch.testing.assert_close(state, moved(want[stage], "cpu"), rtol=1e-3, atol=1e-5,
                                       msg=lambda said, where=f"rank {rank}, stage {stage}": f"{where}: {said}")
