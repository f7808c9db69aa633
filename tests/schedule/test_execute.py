"""Pipelines on real ranks: the gradients are those of one process, whatever the schedule."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from course_lib import launch
from course_lib.schedule import add_reductions, add_steps, one_f_one_b, zb_v
from course_lib.schedule.execute import Pipeline
from course_lib.train.gpt import Block, GPTConfig
from tests.schedule.pipes import KINDS, MAKERS, WIDTH, gradients, gradients_of_a_pipeline, truth


def several(cases):
    return [gradients_of_a_pipeline(*case) for case in cases]


def check_against_one_process(cases: list[tuple], ranks: int) -> None:
    found = launch.run(several, cases, ranks=ranks, fabric="loopback", timeout_s=90)
    for k, (name, kind, m, replicas, passes, _) in enumerate(cases):
        own, p = [one[k] for one in found], ranks // replicas
        stages = MAKERS[name](p, m).stages
        loss, expected = truth(kind, stages, list(range(m * replicas * passes)))
        assert sum(share for share, _ in own) == pytest.approx(loss, rel=1e-5)
        for _, of_stages in own:
            for stage, grads in of_stages.items():
                torch.testing.assert_close(grads, expected[stage], rtol=1e-4, atol=1e-6,
                                           msg=lambda text, c=cases[k], s=stage: f"{c}, stage {s}: {text}")
        assert sorted(s for _, of_stages in own[:p] for s in of_stages) == list(range(stages))


@pytest.mark.parametrize(("ranks", "m"), [(2, 3), (3, 5), *(pytest.param(*size, marks=pytest.mark.slow)
                                                             for size in ((1, 2), (4, 6)))])
def test_gradients_are_those_of_one_process(ranks: int, m: int) -> None:
    kinds = list(KINDS)
    check_against_one_process([(name, kinds[(k + ranks) % 2], m, 1, 1, 1) for k, name in enumerate(MAKERS)], ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gradients_of_every_combination(ranks: int) -> None:
    check_against_one_process([(name, kind, m, 1, 1, 1) for name in MAKERS for kind in KINDS for m in (1, 4, 7)], ranks)


def test_replicas_and_outer_accumulation() -> None:
    check_against_one_process([("zero bubble", "mlp", 3, 2, 1, 2), ("1f1b", "gpt", 2, 2, 2, 1),
                               ("zb-v", "mlp", 3, 2, 2, 3), ("interleaved", "gpt", 3, 2, 1, 2)], 4)


def steps_of_tied_stages():
    """ZB-V puts the first and the last stage on rank 0: there they can share a weight. Two replicas of one rank."""
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    last.weight = first.weight
    alone = [dist.new_group([r]) for r in range(2)][dist.get_rank()]
    schedule, stepped = add_steps(add_reductions(zb_v(1, 2))), []

    def step(stage: int) -> None:
        stepped.append((stage, first.weight.grad.clone()))

    pipeline = Pipeline(schedule, {0: first, 1: last}, lambda out, batch: out.square().sum(), group=alone,
                        replicas=dist.group.WORLD, step=step)
    x = [torch.full((2, 4), float(i + 2 * dist.get_rank())) for i in range(2)]
    with pytest.raises(ValueError, match="denominator=0"):
        pipeline.run([(t,) for t in x], 0)
    traffic = dist.group.WORLD.traffic
    before = traffic.calls["all_reduce"]
    pipeline.run([(t,) for t in x], 8, last=False)
    quiet = traffic.calls["all_reduce"] - before
    pipeline.run([(t,) for t in x], 8)
    return stepped, quiet, traffic.calls["all_reduce"] - before


def test_a_weight_of_two_stages_is_reduced_once_and_stepped_after() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4, bias=False)
    for _ in range(2):
        for i in range(4):
            (layer(layer(torch.full((2, 4), float(i)))).square().sum() / 8).backward()
    for stepped, quiet, calls in launch.run(steps_of_tied_stages, ranks=2, fabric="loopback"):
        assert [stage for stage, _ in stepped] == [0, 1] and (quiet, calls) == (0, 1)
        torch.testing.assert_close(stepped[-1][1], layer.weight.grad)


def tied_gpt(replicas: int):
    """Embedding on the first rank of the pipeline, the same weight as output matrix on the last."""
    config = GPTConfig(width=WIDTH, heads=2, length=5, vocab=11)
    torch.manual_seed(dist.get_rank())  # the first holder's weight must win
    world, rank = dist.get_world_size(), dist.get_rank()
    p = world // replicas
    embed, out = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
    torch.manual_seed(7)
    block = Block(config)
    stage = {0: nn.Sequential(embed, block), 1: nn.Sequential(block, out)}[rank % p]
    pipes = [dist.new_group(list(range(k * p, k * p + p))) for k in range(replicas)]
    across = [dist.new_group(list(range(r, world, p))) for r in range(p)]
    _, batch, loss_of, count = KINDS["gpt"]
    window = [batch(i) for i in range(3 * replicas)]
    schedule = add_reductions(one_f_one_b(p, 3))
    pipeline = Pipeline(schedule, {rank % p: stage}, loss_of, group=pipes[rank // p], replicas=across[rank % p],
                        ties=[[(0, "0.weight"), (1, "1.weight")]])
    weight = (embed if rank % p == 0 else out).weight
    pipeline.run(window[3 * (rank // p):][:3], sum(map(count, window)))
    return weight.detach(), weight.grad


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_weight_tied_across_ranks_gets_the_sum_of_both_uses(replicas: int) -> None:
    found = launch.run(tied_gpt, replicas, ranks=2 * replicas, fabric="loopback", timeout_s=60)
    _, batch, loss_of, count = KINDS["gpt"]
    torch.manual_seed(0)
    embed, out = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
    out.weight = embed.weight
    torch.manual_seed(7)
    block = Block(GPTConfig(width=WIDTH, heads=2, length=5, vocab=11))
    again = copy.deepcopy(block)
    window = [batch(i) for i in range(3 * replicas)]
    model = nn.Sequential(embed, block, again, out)
    (sum(loss_of(model(b[0]), b) for b in window) / sum(map(count, window))).backward()
    for weight, grad in found:
        torch.testing.assert_close(weight, embed.weight.detach())
        torch.testing.assert_close(grad, embed.weight.grad)


def torchs_gradients(name: str, m: int):
    """The same stages and micro-batches under torch's own runtime, on the same ranks and wire."""
    schedules = {"1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
                 "zero bubble": "ScheduleInterleavedZeroBubble", "zb-v": "ScheduleZBVZeroBubble"}
    rank, p, n = dist.get_rank(), dist.get_world_size(), MAKERS[name](dist.get_world_size(), m).stages
    make, batch, loss_of, count = KINDS["plain"]
    held, window = MAKERS[name](p, m).stages_of(rank), [batch(i) for i in range(m)]
    every, total = make(n), sum(map(count, window))
    stages = [pipelining.PipelineStage(every[s], s, n, torch.device("cpu")) for s in held]
    xs, ys = (torch.cat(parts) for parts in zip(*window))
    schedule = getattr(pipelining, schedules[name])(stages[0] if name == "1f1b" else stages, m, scale_grads=False,
                                                    loss_fn=lambda out, y: loss_of(out, (None, y)) / total)
    schedule.step(*([xs] if 0 in held else []), **({"target": ys} if n - 1 in held else {}))
    return {s: gradients(every[s]) for s in held}


def both(m: int):
    return [(gradients_of_a_pipeline(name, "plain", m)[1], torchs_gradients(name, m))
            for name in ("1f1b", "interleaved", "zero bubble", "zb-v")]


def test_gradients_are_those_of_torchs_own_pipelines() -> None:
    for cases in launch.run(both, 4, ranks=2, fabric="loopback", timeout_s=90):
        for ours, theirs in cases:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
