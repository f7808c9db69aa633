"""Steps, gathers and frees anywhere on the circle: what `check` lets pass trains like one process, on ranks; what it
refuses would not."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib import launch
from course_lib.schedule import Op, Schedule, ScheduleError, add_gathers, check, execute, zb_v, zero_bubble
from course_lib.schedule.action import WHOLE
from course_lib.schedule.degrees import Degrees
from course_lib.schedule.execute import Pipeline
from course_lib.schedule.grid import grid
from course_lib.schedule.joint import naive, reductions_at_last_use, steps_by_bucket, under_the_next_pass
from course_lib.simulate.greedy import greedy
from course_lib.simulate.pipeline import Costs
from course_lib.simulate.place import joint
from course_lib.simulate.search import _moved, search
from tests.schedule.turns import placed, wrong

COSTS = Costs(F=1.0, I=1.0, W=1.0, reduce=0.4, gather=0.9, step=0.1)
ONE = "stages on ranks 0; 1 micro-batches; buckets 2\nrank 0: "


def refused(schedule: Schedule) -> str:
    try:
        check(schedule)
    except ScheduleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("text", [
    "free step gather F0 B0 reduce0 reduce1", "step free gather F0 B0 reduce0 reduce1",
    "free step0 gather0 step1 gather1 F0 B0 reduce0 reduce1", "step gather F0 B0 reduce0 free reduce1",
    "free gather F0 B0 reduce0 reduce1"])
def test_where_in_its_turn_a_stage_is_freed_is_open(text: str) -> None:
    assert not refused(Schedule.parse(ONE + text))


@pytest.mark.parametrize(("text", "says"), [
    ("free F0 B0 reduce0 reduce1 step gather", r"F0 .* not gathered: free .action 0. has dropped them; put gather "),
    ("F0 free gather B0 reduce0 reduce1 step", "does F0 with the old parameters of bucket 0 of stage 0"),
    ("step F0 free gather B0 reduce0 reduce1", "does F0 with the old parameters of bucket 0 of stage 0"),
    ("F0 free gather B0 reduce0 reduce1", "old parameters .* it gathered before the step and keeps"),
    ("step gather0 F0 free gather B0 reduce0 reduce1", "does F0 with the old parameters of bucket 1 of stage 0"),
])
def test_what_a_pass_begins_with_was_gathered_in_the_turn_before(text: str, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        check(Schedule.parse(ONE + text))


def test_check_refuses_exactly_what_does_not_train_as_it_should() -> None:
    """Against a walk with an account of its own. Only what is gathered for nothing is refused though it would train."""
    draw, seen = random.Random(0), Counter()
    for _ in range(3000):
        schedule = placed(zero_bubble(1, 2, 2), 2, draw)
        says, fault = refused(schedule), wrong(schedule)
        if says and not fault:
            assert "before the step of" in says and max(n for a, n in Counter(schedule.ranks[0]).items()) > 1, says
        else:
            assert bool(says) == bool(fault), (schedule.text(), says, fault)
        seen["good" if not says else "old" if "old parameters" in says else "refused"] += 1
    assert min(seen.values()) > 100 and len(seen) == 3, seen


MADE = {
    "naive": lambda bare: naive(bare, 2), "ZeRO-3": lambda bare: naive(add_gathers(bare, 1), 2),
    "next": lambda bare: under_the_next_pass(steps_by_bucket(reductions_at_last_use(naive(bare, 2)))),
    "ZeRO-3, next": lambda bare: under_the_next_pass(reductions_at_last_use(naive(add_gathers(bare, 1), 2))),
    "greedy": lambda bare: greedy(bare, COSTS, 2), "joint": lambda bare: joint(bare, COSTS, 2)}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("bare", [zero_bubble(2, 2, 2), zb_v(2, 2)])
def test_neither_a_pass_nor_any_move_of_the_search_makes_one_that_does_not(bare: Schedule, made: str) -> None:
    """The search takes what `check` lets pass, so all of its walk has to train."""
    schedule, draw = MADE[made](bare), random.Random(0)
    assert not wrong(schedule)
    taken = 0
    for _ in range(300):
        other = _moved(schedule, draw)
        if not refused(other):
            taken, schedule = taken + (other != schedule), other
            assert not wrong(other), other.text()
    assert taken > 30
    assert not wrong(search(MADE[made](bare), COSTS, moves=40, memory=6).schedule)


# on ranks

M, UPDATES, RATE, WIDTH = 2, 3, 0.3, 5
PLACE = Degrees(2, 1, 2)
OLD = """stages on ranks 0 1; 2 micro-batches; buckets 1 1
rank 0: F0 free gather F1 B0 B1 reduce0 step
rank 1: F0 B0 F1 B1 free reduce0 step gather"""


def valid(count: int) -> list[Schedule]:
    draw, found = random.Random(1), []
    while len(found) < count:
        schedule = placed(zero_bubble(2, M, 2), 2, draw)
        found += [] if refused(schedule) else [schedule]
    return found


def stages(n: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(n)]


def loss_of(output: torch.Tensor, batch) -> torch.Tensor:
    return (output - batch[1]).square().sum()


def windows() -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """[update] -> the micro-batches of all replicas."""
    g = torch.Generator().manual_seed(0)
    return [[(torch.randn(2, WIDTH, generator=g), torch.randn(2, WIDTH, generator=g)) for _ in range(M * PLACE.data)]
            for _ in range(UPDATES)]


def reference(n: int):
    """By update the loss, and all parameters behind it."""
    model, out = nn.Sequential(*stages(n)), []
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for window in windows():
        loss = sum(loss_of(model(b[0]), b) for b in window) / len(window)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append((float(loss.detach()), [[p.detach().clone() for p in stage.parameters()] for stage in model]))
    return out


def trained(schedule: Schedule, read: bool):
    """On a rank: by update its share of the loss, and with `read`, or at the end, the parameters of its stages."""
    place, every, optimizers = grid(PLACE), stages(schedule.stages), {}

    def step(stage: int, bucket: int = WHOLE) -> None:
        optimizers[stage, bucket].step()
        optimizers[stage, bucket].zero_grad()

    mine = {s: every[s] for s in schedule.stages_of(place.stage)}
    pipeline = Pipeline(schedule, mine, loss_of, group=place.pipeline, replicas=place.data, step=step)
    for a in schedule.ranks[place.stage]:
        if a.op is Op.STEP:
            optimizers[a.stage, a.index] = torch.optim.SGD(pipeline.parameters(a.stage, a.index), RATE)
    out = []
    for k, window in enumerate(windows()):
        share, found = pipeline.run(window[place.replica * M:(place.replica + 1) * M], len(window)), {}
        if read or k == UPDATES - 1:
            with pipeline.gathered():
                found = {s: [p.detach().clone() for p in module.parameters()] for s, module in mine.items()}
        out.append((share, found))
    return out


def all_trained(count: int):
    """Every placement, read behind each update or only at the end; and one that `check` does not let pass."""
    found = [trained(schedule, k % 2 == 0) for k, schedule in enumerate(valid(count))]
    execute.check, checked = (lambda schedule: None), execute.check
    try:
        return found, trained(Schedule.parse(OLD), False)
    finally:
        execute.check = checked
        dist.barrier()


def test_what_check_lets_pass_trains_like_one_process_wherever_it_is_placed() -> None:
    count = 30
    assert any(a.op is Op.FREE for s in valid(count) for actions in s.ranks for a in actions[:3]), "some at the front"
    want, rows = reference(4), launch.run(all_trained, count, ranks=PLACE.ranks, fabric="loopback", timeout_s=90)
    for k, schedule in enumerate(valid(count)):
        for update, (loss, params) in enumerate(want):
            shares = [row[0][k][update][0] for row in rows]
            assert sum(shares) == pytest.approx(loss, rel=1e-5), schedule.text()
            for row in rows:
                for stage, found in row[0][k][update][1].items():
                    torch.testing.assert_close(found, params[stage], rtol=1e-4, atol=1e-6,
                                               msg=f"update {update}, stage {stage} of\n{schedule}")
    assert "old parameters" in refused(Schedule.parse(OLD))
    losses = [sum(row[1][update][0] for row in rows) for update in range(UPDATES)]
    true = [loss for loss, _ in reference(2)]
    assert losses[0] == pytest.approx(true[0], rel=1e-5) and abs(losses[1] / true[1] - 1) > 1e-3, "it is not the same"
