"""ZeRO on ranks: the single-process result in every stage, the bytes of each, and what is refused."""

from __future__ import annotations

import gc
import weakref
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.launch import run
from course_lib.plan.volumes import data_parallel_bytes, shuffle_bytes
from course_lib.record import recording
from course_lib.train import Sharded, accumulate, data, emulated, wrap
from course_lib.train.clip import clip_grad_norm
from course_lib.train.data import count_of
from course_lib.train.gpt import squared_loss
from course_lib.train.reference import reference
from tests.train.cases import CASES, make_model, make_optimizer, mlp, state, windows
from tests.train.on_ranks import together
from tests.train.trainer import Bomb, Boom, Mined

STAGES = (1, 2, 3)
RUNS = [(2, 3), *(pytest.param(case, marks=pytest.mark.slow) for case in ((1, 1), (2, 1), (3, 3), (4, 3)))]


def train(case_name: str, stage: int, micro_steps: int) -> dict[str, torch.Tensor]:
    case, rank = CASES[case_name], dist.get_rank()
    model = wrap(f"zero{stage}", make_model(case_name, seed=rank), find_unused=case.unused)  # rank 0's must win
    optimizer = make_optimizer(model.shards())
    for window in windows(case_name, rank, micro_steps):
        counts = [count_of(b) for b in window] if case.ragged else None
        accumulate(model, window, case.loss_of, case.normalise, counts, every=stage > 1)
        optimizer.step()
        optimizer.zero_grad()
    with model.gathered():
        return state(model.module)


def everything(micro_steps: int) -> dict:
    torch.set_num_threads(1)
    return {(case, stage): train(case, stage, micro_steps) for case in CASES for stage in STAGES}


@pytest.fixture(scope="module", params=RUNS, ids=lambda r: f"{r[0]} ranks, N={r[1]}")
def trained(request) -> tuple[int, int, list[dict]]:
    ranks, micro_steps = request.param
    return ranks, micro_steps, run(everything, micro_steps, ranks=ranks, fabric="loopback")


@cache
def expected(case_name: str, ranks: int, micro_steps: int) -> dict[str, torch.Tensor]:
    case = CASES[case_name]
    per_rank = [windows(case_name, r, micro_steps) for r in range(ranks)]
    return reference(lambda: make_model(case_name), list(zip(*per_rank)), case.loss_of, make_optimizer, case.normalise)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", CASES)
def test_parameters_equal_the_reference(case: str, stage: int, trained: tuple[int, int, list[dict]]) -> None:
    ranks, micro_steps, results = trained
    want, start = expected(case, ranks, micro_steps), state(make_model(case))
    assert any(not torch.equal(want[n], start[n]) for n in want), "nothing was learnt, so nothing is compared"
    for name, tensor in want.items():
        for rank, result in enumerate(results):
            got, first = result[case, stage][name], results[0][case, stage][name]
            assert torch.equal(got, first), f"{name} differs between rank {rank} and rank 0"
            torch.testing.assert_close(got, tensor, rtol=1e-5, atol=CASES[case].atol)


# checks on two ranks, all in one run

on_ranks, got = together()


def batches(count: int, rank: int | None = None) -> list:
    return list(data.synthetic(4, 6, count, seed=3, rank=dist.get_rank() if rank is None else rank))


def model_of(kind=mlp, stage: int = 3, **options) -> Sharded:
    torch.manual_seed(0)
    return Sharded(kind(), stage=stage, **options)


def error_of(action) -> str:
    try:
        action()
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Wide(nn.Module):
    """1 MB in four layers, and a root of its own that is small."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 256, bias=False) for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


@on_ranks
def bytes_of_each_stage():
    out = {}
    for stage in STAGES:
        for micro_steps in (1, 4):
            model = model_of(Wide, stage)
            optimizer = torch.optim.SGD(model.shards(), lr=0.1)
            traffic, x = dist.group.WORLD.traffic, torch.ones(2, 256)
            for _ in range(2):
                traffic.reset()
                accumulate(model, [x] * micro_steps, lambda m, b: (m(b).square().sum(), 1), "micro", every=stage > 1)
                out[stage, micro_steps] = traffic.total_bytes
                optimizer.step()
    return out


def test_bytes_of_each_stage(got) -> None:
    """The planner's formula, but that stage 3 keeps the last of its four units from forward to backward."""
    whole = 4 * 256 * 256 * 4
    for rank in got(bytes_of_each_stage):
        for (stage, micro_steps), sent in rank.items():
            kept = micro_steps * shuffle_bytes(whole / 4, 2) if stage == 3 else 0
            want = data_parallel_bytes(whole, 2, micro_steps, stage=stage) - kept
            assert sent == pytest.approx(want, rel=0.05), (stage, micro_steps)


@on_ranks
def clipping():
    out = {}
    for stage in STAGES:
        model = model_of(stage=stage)
        optimizer = torch.optim.SGD(model.shards(), lr=1.0)
        accumulate(model, batches(1), squared_loss, "micro", every=True)
        norm = float(model.clip_grad_norm(0.01))
        optimizer.step()
        out[stage] = norm, model.full_state_dict()
    return out


def test_clipping_is_by_the_norm_over_all_ranks(got) -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for rank in range(2):
        summed, count = squared_loss(model, batches(1, rank)[0])
        (summed / count / 2).backward()
    norm = float(clip_grad_norm(model.parameters(), 0.01))
    optimizer.step()
    for rank in got(clipping):
        for stage in STAGES:
            assert rank[stage][0] == pytest.approx(norm, rel=1e-5)
            for name, value in model.state_dict().items():
                torch.testing.assert_close(rank[stage][1][name], value, rtol=1e-5, atol=1e-6)


@on_ranks
def what_is_there():
    out = {}
    for stage in STAGES:
        model = model_of(stage=stage)
        weight = model.module[2].weight
        before, hidden = weight.numel(), error_of(lambda w=weight: w @ torch.ones(16))
        with model.gathered():
            inside = weight.shape
        with torch.no_grad():
            model(torch.ones(2, 6))
        loss = model(torch.ones(2, 6)).sum()
        held = weight.numel() > 0
        loss.backward()
        after = weight.numel() > 0
        model.finish_gradient_synchronization()
        torch.optim.SGD(model.shards(), lr=0.1).step()
        out[stage] = before, hidden, inside, held, after, weight.numel()
        model.close()
        out[stage] += weight.shape, [p.grad for p in model.module.parameters()]
    return out


def test_a_parameter_that_is_not_gathered_cannot_be_used(got) -> None:
    for rank in got(what_is_there):
        for stage in STAGES:
            before, hidden, inside, held, after, stepped, closed, grads = rank[stage]
            assert before == stepped == 0 and hidden.startswith("RuntimeError")
            assert inside == closed == (16, 16)
            assert held is after is (stage < 3), "stage 3 frees the middle layer after forward, and after backward"
            assert grads == [None] * 6


class Choosing(nn.Module):
    """Each rank takes a layer of its own, and the first one again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)]), nn.Linear(6, 1)

    def forward(self, x):
        x = torch.tanh(self.layers[0](x))
        x = torch.tanh(self.layers[1 if x[0, 0] > 0 else 2](x))
        return self.out(torch.tanh(self.layers[0](x)))


def choices(rank: int) -> list:
    x = torch.full((4, 6), 1.0 if rank else -1.0)
    return [(x, torch.ones(4, 1)), (x * 0.5, torch.ones(4, 1))]


@on_ranks
def choosing():
    out = {}
    for stage in STAGES:
        model = model_of(Choosing, stage, find_unused=True)
        optimizer = make_optimizer(model.shards())
        for _ in range(2):
            accumulate(model, choices(dist.get_rank()), squared_loss, "micro", every=True)
            optimizer.step()
            optimizer.zero_grad()
        out[stage] = model.full_state_dict()
    return out


def test_ranks_that_run_other_units_keep_in_step(got) -> None:
    """Units used twice, by one rank only, and by none: gathers and reductions pair up all the same."""
    def make():
        torch.manual_seed(0)
        return Choosing()

    want = reference(make, [[choices(0), choices(1)]] * 2, squared_loss, make_optimizer, "micro")
    for rank in got(choosing):
        for stage in STAGES:
            for name, value in want.items():
                torch.testing.assert_close(rank[stage][name], value, rtol=1e-5, atol=1e-6)


@on_ranks
def whole_gradients():
    out = {}
    for allowed in (False, True):
        model = model_of(whole_gradients=allowed)
        out[allowed] = error_of(lambda m=model: accumulate(m, batches(3), squared_loss, "micro"))
    held = [piece.grad.clone() for piece in model.shards()]
    other = model_of()
    accumulate(other, batches(3), squared_loss, "micro", every=True)
    return out, all(torch.allclose(a, b.grad, atol=1e-6) for a, b in zip(held, other.shards()))


def test_no_sync_is_refused_where_it_would_keep_the_whole_gradient(got) -> None:
    for errors, same in got(whole_gradients):
        assert "no_sync() in ZeRO stage 3 would keep the whole gradient" in errors[False]
        assert errors[True] == "" and same


@on_ranks
def a_broken_backward():
    out = {}
    for stage in STAGES:
        model = model_of(Mined, stage)
        optimizer = torch.optim.SGD(model.shards(), lr=0.1)
        x, first = batches(1)[0][0], ""
        try:
            Bomb.armed = dist.get_rank() == 1
            model(x).sum().backward()
            Bomb.armed = False
            model.finish_gradient_synchronization()
        except (RuntimeError, Boom) as error:
            first = f"{type(error).__name__}: {error}"
        Bomb.armed = False
        for _ in range(2):
            model(x).sum().backward()
            model.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad()
        out[stage] = first, model.full_state_dict()
    return out


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_backward_that_raises_costs_one_window(got) -> None:
    one, two = got(a_broken_backward)
    want = None
    for stage in STAGES:
        assert "an exception ended the backward pass of rank 1" in one[stage][0] and two[stage][0].startswith("Boom")
        want = want or one[stage][1]
        for rank in (one, two):
            for name, value in want.items():
                torch.testing.assert_close(rank[stage][1][name], value, rtol=1e-5, atol=1e-6)


@on_ranks
def a_step_left_out():
    out = {}
    for stage in STAGES:
        model = model_of(stage=stage)
        optimizer = torch.optim.SGD(model.shards(), lr=0.1)
        for window in range(2):
            out[stage] = error_of(lambda m=model: accumulate(m, batches(1), squared_loss, "micro", every=True))
            if window or dist.get_rank() == 0:
                error_of(optimizer.step)
    return out


def test_a_rank_that_leaves_out_a_step_is_named(got) -> None:
    """As a gradient scaler does that looks at the shards of its own rank only."""
    for rank in got(a_step_left_out):
        for stage in STAGES:
            assert "not at the same update (rank 0: 1 steps in 1 windows, rank 1: 0 steps in 1 windows)" in rank[stage]


@on_ranks
def overlap():
    """For each unit but the first: did its first message of forward, and of backward, leave before the layer before it
    (in that pass) had ended? And is a wrapper gone when nobody holds it?"""
    out = {}
    for prefetch in (0, 1):
        model = model_of(lambda: emulated.equal(layers=5, mb=0.01, forward_ms=8, backward_ms=8), prefetch=prefetch)
        with recording() as recorder:
            model(torch.ones(4)).square().mean().backward()
        model.finish_gradient_synchronization()
        spans = recorder.timeline().spans
        device = sorted((s for s in spans if s.lane == "device"), key=lambda s: s.start)
        sends = sorted((s for s in spans if s.kind == "comm"), key=lambda s: s.start)
        forward, backward = device[:5], device[5:]
        first = {s.bucket: s.start for s in reversed(sends) if s.start < forward[-1].stop}
        ahead = [first[i] < forward[i - 1].stop for i in range(1, 5)]
        reduced = sum(any(s.start >= backward[i].stop and s.start < backward[-1].stop and s.bucket == 4 - i
                          for s in sends) for i in range(4))
        out[prefetch] = ahead, reduced
    gone = weakref.ref(model)
    del model
    gc.collect()
    return out, gone() is None


def test_gathers_and_reductions_travel_under_compute(got) -> None:
    for seen, gone in got(overlap):
        assert seen[0][0] == [False] * 4 and seen[1][0] == [True] * 4, "prefetch is what sends a gather early"
        assert seen[0][1] == seen[1][1] == 4, "every reduction but the last leaves under backward"
        assert gone


@on_ranks
def misuse():
    model = model_of()
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    found = {"parameters": error_of(optimizer.step), "state_dict": error_of(model.state_dict),
             "stage": error_of(lambda: model_of(stage=4)), "prefetch": error_of(lambda: model_of(prefetch=-1)),
             "unit": error_of(lambda: model_of(units=["7"])),
             "list": error_of(lambda: model_of(Wide, units=["layers"])),
             "inside": error_of(lambda: model_of(Mined, units=["layers", "layers.0"]))}

    class Hides(nn.Sequential):
        def forward(self, x):
            return iter([super().forward(x)])

    hidden = model_of(lambda: nn.ModuleList([Hides(nn.Linear(6, 1))]))
    found["output"] = error_of(lambda: hidden.module[0](torch.ones(2, 6)))
    return found


@pytest.mark.parametrize("what, text", [
    ("parameters", "give it model.shards()"), ("state_dict", "save full_state_dict()"), ("stage", "choose 1"),
    ("prefetch", "0 or more"), ("unit", "unit '7' is no module of Sequential"), ("list", "name its members"),
    ("inside", "'layers.0' lies inside unit 'layers'"), ("output", "no tensor is found")])
def test_misuse_is_named(got, what: str, text: str) -> None:
    for rank in got(misuse):
        assert text in rank[what]
