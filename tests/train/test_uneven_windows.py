"""Windows that are cut differently, short, or empty on one rank: the same update as in one process, and no hang."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.launch import run
from course_lib.train import EveryStep, SynchronizationError, accumulate, data, wrap
from course_lib.train.gpt import GPT, GPTConfig, next_byte_loss, squared_loss
from course_lib.train.loss import updates
from course_lib.train.loss import windows as cut
from course_lib.train.reference import reference
from tests.train.cases import make_model, make_optimizer, state
from tests.train.on_ranks import OURS, RANKS, SMALL

STRATEGIES = {**OURS, "bucketed sum": ("bucketed", {"bucket_mb": SMALL, "op": "sum"}),
              "ddp": ("ddp", {"bucket_mb": SMALL, "first_bucket_mb": None}),
              "every_step": ("every_step", {"bucket_mb": SMALL})}
UPDATES, ROWS, LENGTH, EPOCH, N = 2, 8, 12, 7, 3


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(length=16, layers=1, heads=2, width=12))


def rows(rank: int) -> list[data.Batch]:
    """One ragged batch an update."""
    return list(data.batches(data.text(0.1), ROWS, LENGTH, UPDATES, seed=3, rank=rank, ragged=True))


def split(batch: data.Batch, parts: int) -> list[data.Batch]:
    return list(zip(*(t.chunk(parts) for t in batch)))


NOTHING = torch.zeros(1, LENGTH, dtype=torch.int64), torch.full((1, LENGTH), data.IGNORE)
"""A micro-batch without a target: its summed loss is 0, and so is its gradient."""


def text_windows(rank: int, micro_steps: int, short: bool) -> list[list[data.Batch]]:
    """With `short`, rank 1 runs out of data: half a window in the first update, nothing in the second."""
    found = [split(batch, micro_steps) for batch in rows(rank)]
    return [found[0][:micro_steps // 2], []] if short and rank == 1 else found


def on_text(strategy: str, micro_steps: int, short: bool = False) -> tuple[dict[str, torch.Tensor], list[float]]:
    name, options = STRATEGIES[strategy]
    model = wrap(name, gpt(), **options)
    optimizer = make_optimizer(model.parameters())
    losses = []
    for window in text_windows(dist.get_rank(), micro_steps, short):
        window = [*window, *[NOTHING] * (micro_steps - len(window))]
        losses.append(accumulate(model, window, next_byte_loss, "tokens", [data.count_of(b) for b in window],
                                 options.get("op", "mean"), every=isinstance(model, EveryStep)))
        optimizer.step()
        optimizer.zero_grad()
    return state(model.module), losses


def epoch(rank: int) -> list[data.Batch]:
    return list(data.synthetic(4, 6, EPOCH, seed=7, rank=rank))


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Falls to 0 with the last update of two epochs."""
    total = 2 * updates(EPOCH, N)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 - done / total)


def two_epochs(strategy: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    name, options = STRATEGIES[strategy]
    model = wrap(name, make_model("equal"), **options)
    optimizer = make_optimizer(model.parameters())
    scheduler, rates = scheduler_of(optimizer), []
    for _ in range(2):
        for window in cut(epoch(dist.get_rank()), N):
            accumulate(model, window, squared_loss, "micro", op=options.get("op", "mean"),
                       every=isinstance(model, EveryStep))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(scheduler.get_last_lr()[0])
    return state(model.module), rates


def skipped_together(strategy: str) -> tuple[dict[str, torch.Tensor], int, str]:
    """Rank 1's loss is not a number in two micro-steps; all ranks ask before backward and leave both out: one in the
    middle of a window, and one at its end, which takes the window with it."""
    name, options = STRATEGIES[strategy]
    model = wrap(name, make_model("equal"), **options)
    optimizer = make_optimizer(model.parameters())
    skipped, said = 0, ""
    for k, window in enumerate(cut(epoch(dist.get_rank()), N)):
        for i, batch in enumerate(window):
            with nullcontext() if i == len(window) - 1 else model.no_sync():
                loss = squared_loss(model, batch)[0]
            bad = torch.tensor(float(dist.get_rank() == 1 and (k, i) in ((0, 1), (1, 2))))
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
            if bad:
                skipped += 1
            else:
                (loss / len(window)).backward()
        try:
            model.finish_gradient_synchronization()
            optimizer.step()
        except SynchronizationError as error:
            said = str(error)
        optimizer.zero_grad()
    return state(model.module), skipped, said


def everything() -> dict:
    torch.set_num_threads(1)
    out = {("cut", s, n): on_text(s, n) for s in STRATEGIES for n in (1, 2, 4)}
    out |= {("short", s): on_text(s, 4, short=True) for s in STRATEGIES}
    out |= {("epochs", s): two_epochs(s) for s in STRATEGIES}
    return out | {("skipped", s): skipped_together(s) for s in ("no_sync", "bucketed")}


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return run(everything, ranks=RANKS, fabric="loopback")


def assert_close(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor], where: str) -> None:
    for name, tensor in want.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5,
                                   msg=lambda m, name=name: f"{where}, {name}: {m}")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_number_of_micro_steps_changes_neither_the_update_nor_the_loss(strategy: str, results: list[dict]) -> None:
    want = reference(gpt, list(zip(*([[batch] for batch in rows(rank)] for rank in range(RANKS)))), next_byte_loss,
                     make_optimizer)
    first = [sum(float(next_byte_loss(gpt(), rows(r)[0])[0].detach()) for r in range(RANKS))]
    first[0] /= sum(data.count_of(rows(r)[0]) for r in range(RANKS))
    for n in (1, 2, 4):
        for rank in results:
            assert_close(rank["cut", strategy, n][0], want, f"N={n}")
        shares = [sum(rank["cut", strategy, n][1][k] for rank in results) for k in range(UPDATES)]
        assert shares[0] == pytest.approx(first[0], rel=1e-5), "the ranks' shares add up to the loss of the window"
        assert shares == pytest.approx([sum(r["cut", strategy, 1][1][k] for r in results) for k in range(UPDATES)])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_without_data_takes_part_with_a_loss_of_zero(strategy: str, results: list[dict]) -> None:
    """One denominator for all ranks, so the update is that of the tokens there are."""
    per_rank = [text_windows(rank, 4, short=True) for rank in range(RANKS)]
    want = reference(gpt, list(zip(*per_rank)), next_byte_loss, make_optimizer)
    for rank in results:
        assert_close(rank["short", strategy][0], want, strategy)
    assert [loss for rank in results[1:] for loss in rank["short", strategy][1][1:]] == [0.0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_epochs_with_a_short_last_window_and_a_schedule_that_counts_updates(strategy: str, results: list[dict]) -> None:
    def scheduled(params):
        optimizer = make_optimizer(params)
        scheduler = scheduler_of(optimizer)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    per_rank = [[*cut(epoch(rank), N)] * 2 for rank in range(RANKS)]
    want = reference(lambda: make_model("equal"), list(zip(*per_rank)), squared_loss, scheduled, "micro")
    for found, rates in (rank["epochs", strategy] for rank in results):
        assert_close(found, want, strategy)
        assert rates == pytest.approx([0.05 * left / 6 for left in range(5, -1, -1)]), "7 batches in windows of 3: 3"


@pytest.mark.parametrize("strategy", ["no_sync", "bucketed"])
def test_what_all_ranks_skip_together_is_left_out(strategy: str, results: list[dict]) -> None:
    """Left out at the end of a window, nothing has sent it: an error says so, and the next window is right."""
    def weighed(model: nn.Module, batch: tuple) -> tuple[torch.Tensor, int]:
        summed, count = squared_loss(model, batch[:2])
        return summed * batch[2] / RANKS, count

    cuts = [[*cut(epoch(rank), N)] for rank in range(RANKS)]
    first = [[(*windows[0][i], 1 / N) for i in (0, 2)] for windows in cuts]
    last = [[(*windows[2][0], 1)] for windows in cuts]
    want = reference(lambda: make_model("equal"), [first, last], weighed, make_optimizer, "none")
    for found, skipped, said in (rank["skipped", strategy] for rank in results):
        assert skipped == 2
        assert said.startswith("window 1: the last forward pass of ranks 0 and 1 ran outside no_sync() but had no back")
        assert_close(found, want, strategy)
