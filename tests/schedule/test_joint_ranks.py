"""PP × TP × ZeRO on ranks: two updates of a GPT are those of one process, wherever steps and gathers are placed."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from course_lib import launch
from course_lib.schedule import Op, add_gathers, add_reductions, add_steps, check, zero_bubble
from course_lib.schedule.action import WHOLE
from course_lib.schedule.cycle import carried
from course_lib.schedule.degrees import Degrees
from course_lib.schedule.execute import Pipeline
from course_lib.schedule.grid import grid
from course_lib.schedule.joint import (
    delay_weights,
    first_needed_first,
    naive,
    reductions_at_last_use,
    steps_by_bucket,
    under_the_next_pass,
)
from course_lib.simulate.greedy import greedy
from course_lib.simulate.pipeline import Costs
from course_lib.tensor import full_state, parallel_gpt
from course_lib.tensor.vocabulary import vocab_parallel_cross_entropy
from course_lib.train.gpt import GPT, GPTConfig

M, V, LR, PASSES, UPDATES = 2, 2, 0.5, 2, 2
CONFIG = GPTConfig(vocab=11, length=5, layers=4, heads=2, width=6, tied=False)


class Stage(nn.Module):
    """Blocks `first` to `last` of a GPT, with what stands before the first and behind the last."""

    def __init__(self, model: GPT, first: int, last: int) -> None:
        super().__init__()
        self.front = nn.ModuleList([model.embed, model.position] if first == 0 else [])
        self.blocks = model.blocks[first:last]
        self.back = nn.ModuleList([model.norm, model.head] if last == CONFIG.layers else [])

    def forward(self, x):
        if self.front:
            embed, position = self.front
            x = embed(x) + position(torch.arange(x.shape[1]))
        for part in (*self.blocks, *self.back):
            x = part(x)
        return x


def cut(model: GPT, stages: int) -> list[Stage]:
    return [Stage(model, a, b) for a, b in pairwise(CONFIG.layers * s // stages for s in range(stages + 1))]


def make() -> GPT:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    model.blocks[1].norm1.weight.requires_grad_(False)
    return model


def batch(i: int):
    """Ragged: the last i % 3 targets of each row do not count."""
    g = torch.Generator().manual_seed(i)
    x, y = (torch.randint(0, CONFIG.vocab, (2, CONFIG.length), generator=g) for _ in range(2))
    y[:, CONFIG.length - i % 3:] = -100
    return x, y


def windows(data: int):
    """[update][replica][pass] -> micro-batches."""
    each = iter(range(UPDATES * data * PASSES * M))
    return [[[[batch(next(each)) for _ in range(M)] for _ in range(PASSES)] for _ in range(data)]
            for _ in range(UPDATES)]


def terms(update) -> int:
    return sum(int((y != -100).sum()) for replica in update for window in replica for _, y in window)


def schedules(p: int, zero: bool) -> dict:
    """Everything waits, the passes one after the other, and what the greedy search finds."""
    bare = zero_bubble(p, M, V)
    if not zero:  # whole parameters on every replica
        reduced = add_steps(add_reductions(bare, 2))
        return {"replicas": reduced, "replicas, by bucket": under_the_next_pass(steps_by_bucket(reduced))}
    given = naive(bare, 2)
    late = first_needed_first(delay_weights(reductions_at_last_use(given), 2))
    zero3 = reductions_at_last_use(naive(add_gathers(bare, 1), 2))
    made = {"naive": given, "passes": under_the_next_pass(steps_by_bucket(late)),
            "ZeRO-3": under_the_next_pass(steps_by_bucket(zero3), ahead=0),
            "greedy": greedy(bare, Costs(F=1.0, I=1.0, W=1.0, reduce=0.9, gather=1.0, step=0.1), 2)}
    assert any(carried(made["greedy"], rank) for rank in range(p)) and carried(made["passes"], 0)
    assert max(check(made["ZeRO-3"]).peak_gathered) == 1 < max(check(given).peak_gathered)
    return made


def two_updates(degrees: Degrees, zero: bool, names: list[str]):
    """By schedule what `one` found on this rank."""
    place, made = grid(degrees), schedules(degrees.pipeline, zero)
    return {name: one(made[name], place, degrees) for name in names}


def one(schedule, place, degrees: Degrees):
    """Loss shares, whole parameters of this rank's stages, steps done, and this rank's place among the shards."""
    every = cut(parallel_gpt(make(), place.tensor), schedule.stages)
    optimizers, steps = {}, []

    def step(stage: int, bucket: int = WHOLE) -> None:
        steps.append((stage, bucket))
        optimizers[stage, bucket].step()
        optimizers[stage, bucket].zero_grad()

    def loss_of(scores, micro):
        return vocab_parallel_cross_entropy(scores, micro[1], place.tensor, CONFIG.vocab, reduction="sum")

    mine = {s: every[s] for s in schedule.stages_of(place.stage)}
    pipeline = Pipeline(schedule, mine, loss_of, group=place.pipeline, replicas=place.data, step=step)
    for action in schedule.ranks[place.stage]:
        if action.op is Op.STEP:
            key = action.stage, action.index
            optimizers[key] = torch.optim.SGD(pipeline.parameters(*key), LR)
    shares = []
    for update in windows(degrees.data):
        own = update[place.replica]
        shares.append(sum(pipeline.run(w, terms(update), last=k == PASSES - 1) for k, w in enumerate(own)))
    with pipeline.gathered():
        return shares, {s: full_state(module) for s, module in mine.items()}, steps, place.shard


def reference(data: int, stages: int):
    model = make()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], LR)
    losses = []
    for update in windows(data):
        loss = sum(nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
                   for replica in update for window in replica for x, y in window) / terms(update)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, [dict(stage.named_parameters()) for stage in cut(model, stages)]


ZERO, WHOLE_COPIES = ["naive", "passes", "ZeRO-3", "greedy"], ["replicas", "replicas, by bucket"]


@pytest.mark.parametrize(("degrees", "zero", "names"), [
    (Degrees(2, 2, 2), True, ZERO[2:]), pytest.param(Degrees(2, 2, 2), True, ZERO[:2], marks=pytest.mark.slow),
    pytest.param(Degrees(2, 1, 2), True, ZERO, marks=pytest.mark.slow),
    pytest.param(Degrees(1, 2, 2), True, ZERO, marks=pytest.mark.slow), (Degrees(2, 1, 2), False, WHOLE_COPIES)])
def test_two_updates_are_those_of_one_process(degrees: Degrees, zero: bool, names: list[str]) -> None:
    p = degrees.pipeline
    losses, want = reference(degrees.data, p * V)
    found = launch.run(two_updates, degrees, zero, names, ranks=degrees.ranks, fabric="loopback", timeout_s=120)
    for name in names:
        schedule = schedules(p, zero)[name]
        shares = torch.tensor([own[name][0] for own in found if own[name][3] == 0])
        torch.testing.assert_close(shares.sum(0), torch.tensor(losses), rtol=1e-5, atol=1e-6)
        for rank, own in enumerate(found):
            _, states, steps, _ = own[name]
            for stage, state in states.items():
                torch.testing.assert_close(state, {k: v.detach() for k, v in want[stage].items()}, rtol=1e-4, atol=1e-6,
                                           msg=partial("{}, rank {}, stage {}: {}".format, name, rank, stage))
            lists = schedule.ranks[rank // degrees.tensor % p]
            assert len(steps) == UPDATES * sum(a.op is Op.STEP for a in lists), "each once an update"


def test_a_step_of_one_bucket_holds_that_bucket() -> None:
    """Together they hold every parameter once."""
    found = launch.run(held, ranks=2, fabric="loopback", timeout_s=60)
    for whole, parts in found:
        assert sorted(whole) == sorted(parts[0] + parts[1]) and all(parts)


def held():
    schedule = add_steps(add_reductions(zero_bubble(2, 2), 2))
    place = grid(Degrees(2))
    pipeline = Pipeline(steps_by_bucket(schedule), {place.stage: nn.Linear(3, 3)}, lambda out, _: out.sum(),
                        group=place.pipeline, step=lambda *_: None)
    return ([id(p) for p in pipeline.parameters(place.stage)],
            [[id(p) for p in pipeline.parameters(place.stage, b)] for b in range(2)])


