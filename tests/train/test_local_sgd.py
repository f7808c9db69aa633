"""Local SGD and DiLoCo: one process with a model for each rank, PyTorch's averager, bytes, and resumed runs."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import optim

from course_lib.launch import run
from course_lib.train.control import SynchronizationError
from course_lib.train.data import count_of
from course_lib.train.diloco import DiLoCo
from course_lib.train.local_sgd import LocalSGD
from course_lib.train.reference_stale import local_reference
from course_lib.train.window import accumulate
from tests.train.cases import CASES, Branches, Odd, make_model, make_optimizer, mlp, state, windows
from tests.train.on_ranks import backward, inputs, model_of, sent, together
from tests.train.trainer import error_of, odd_one, parameters

MICRO = 2
OUTER = (0.7, 0.9)


def adamw(params) -> optim.Optimizer:
    # The gradient of the bias of the keys is rounding alone; a small eps would have Adam take full steps along it.
    return optim.AdamW(params, lr=0.01, weight_decay=0.1, eps=1e-4)


RUNS = {
    "every step": (LocalSGD, {"every": 1}, make_optimizer, {}),
    "two": (LocalSGD, {"every": 2}, make_optimizer, {}),
    "two, AdamW": (LocalSGD, {"every": 2}, adamw, {}),
    "DiLoCo": (DiLoCo, {"every": 1}, adamw, {"outer": OUTER}),
    "DiLoCo of two": (DiLoCo, {"every": 2}, adamw, {"outer": OUTER}),
    "outer SGD": (DiLoCo, {"every": 2, "outer_lr": 0.5, "outer_momentum": 0.0}, make_optimizer, {"outer": (0.5, 0.0)}),
}
PAIRS = [*((case, name) for case in CASES for name in ("two", "DiLoCo of two")), *(("tied", name) for name in RUNS)]


def train(case_name: str, run_name: str) -> dict[str, torch.Tensor]:
    """Parameters after three windows: under every=2 the last is inside a round."""
    case, rank = CASES[case_name], dist.get_rank()
    kind, options, make, _ = RUNS[run_name]
    model = kind(make_model(case_name, seed=rank), **options)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    model.take_optimizer(optimizer)
    for window in windows(case_name, rank, MICRO):
        counts = [count_of(b) for b in window] if case.ragged else None
        accumulate(model, window, case.loss_of, case.normalise, counts)
        optimizer.step()
        optimizer.zero_grad()
    return state(model.module)


def everything() -> dict:
    torch.set_num_threads(1)
    return {(case, name): train(case, name) for case, name in PAIRS}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("ranks", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_every_ranks_parameters_equal_one_process(ranks: int) -> None:
    results = run(everything, ranks=ranks, fabric="loopback")
    for case, name in results[0]:
        _, options, make, more = RUNS[name]
        per_rank = [windows(case, r, MICRO) for r in range(ranks)]
        want = local_reference(lambda case=case: make_model(case), list(zip(*per_rank)), CASES[case].loss_of, make,
                               options["every"], CASES[case].normalise, **more)
        for rank in range(ranks):
            for key, tensor in want[rank].items():
                torch.testing.assert_close(
                    results[rank][case, name][key], tensor, rtol=1e-5, atol=CASES[case].atol,
                    msg=lambda m, where=f"{case}, {name}, rank {rank}, {key}": f"{where}: {m}")


def test_the_references_differ_where_they_should() -> None:
    updates = list(zip(*[windows("equal", r, MICRO) for r in range(2)]))

    def end(every, **more):
        return local_reference(lambda: make_model("equal"), updates, CASES["equal"].loss_of, make_optimizer, every,
                               "micro", **more)

    (mean0, mean1), (two0, two1) = end(1), end(2)
    for name, tensor in mean0.items():
        assert torch.equal(tensor, mean1[name]) and not torch.allclose(two0[name], two1[name], atol=1e-5)
        torch.testing.assert_close(end(1, outer=(1.0, 0.0))[0][name], tensor)
        assert not torch.allclose(end(1, outer=OUTER)[0][name], tensor, atol=1e-5)


on_ranks, got = together()


def local(kind=LocalSGD, model=mlp, make=make_optimizer, **options):
    wrapped = kind(model_of(model), **options)
    optimizer = make(wrapped.parameters())
    wrapped.take_optimizer(optimizer)
    return wrapped, optimizer


def update(model, optimizer, i: int) -> None:
    backward(model, i)
    model.finish_gradient_synchronization()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks
def against_pytorch():
    """PostLocalSGDOptimizer on the same ranks and batches. Its averager skips parameters whose gradient is None, and
    its `.data =` leaves the momentum of each rank alone."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    out = []
    for every in (2, 3):
        model, optimizer = local(every=every)
        theirs = model_of()
        averager = PeriodicModelAverager(every, every - 1)
        post = PostLocalSGDOptimizer(make_optimizer(theirs.parameters()), averager)
        for i in range(7):
            update(model, optimizer, i)
            theirs(inputs(i)).square().sum().backward()
            post.step()
            post.zero_grad()
        momenta = [torch.equal(optimizer.state[p]["momentum_buffer"], post.state[q]["momentum_buffer"])
                   for p, q in zip(model.parameters(), theirs.parameters())]
        out.append((torch.equal(parameters(model), parameters(theirs)), all(momenta)))
    return out


@pytest.mark.filterwarnings("ignore")
def test_the_parameters_and_momenta_are_those_of_pytorchs_averager(got) -> None:
    assert got(against_pytorch) == [[(True, True)] * 2] * 2


@on_ranks
def traffic():
    out = {}
    for name, kind, options in (("local", LocalSGD, {"every": 4}), ("outer", DiLoCo, {"every": 4}),
                                ("state", LocalSGD, {"every": 4, "average_state": True})):
        model, optimizer = local(kind, Odd, **options)
        sent()
        per_step = []
        for i in range(8):
            update(model, optimizer, i)
            per_step.append(sent())
        out[name] = per_step, model.rounds
    return out


def test_one_window_in_every_moves_bytes(got) -> None:
    full = sum(p.numel() for p in Odd().parameters()) * 4  # a ring of two sends as much as the parameters have
    for rank in got(traffic):
        for name, (per_step, rounds) in rank.items():
            times = 2 if name == "state" else 1  # the momentum goes with the parameters
            assert per_step == [(0, 0), (0, 0), (0, 0), (1, full * times)] * 2, name
            assert rounds == 2


def everywhere(tensor: torch.Tensor) -> list[torch.Tensor]:
    out = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(out, tensor)
    return out


@on_ranks
def state_of_the_optimizer():
    out = {}
    for average_state in (False, True):
        model, optimizer = local(every=5, average_state=average_state, make=adamw)
        for i in range(2):
            update(model, optimizer, i)
        state = optimizer.state[next(model.parameters())]
        before = {key: state[key].clone() for key in ("exp_avg", "exp_avg_sq")}
        means = {key: torch.stack(everywhere(tensor)).mean(0) for key, tensor in before.items()}
        model.average()
        want = means if average_state else before
        out[average_state] = [torch.allclose(state[key], want[key], rtol=1e-5, atol=1e-9) for key in want]
        out[average_state] += [not torch.allclose(before[key], means[key], rtol=1e-3) for key in want]
    return out


def test_the_state_is_kept_or_averaged(got) -> None:
    assert got(state_of_the_optimizer) == [{False: [True] * 4, True: [True] * 4}] * 2


@on_ranks
def a_round_that_is_cut_short():
    model, optimizer = local(every=5)
    for i in range(3):
        update(model, optimizer, i)
    apart = not torch.equal(*everywhere(parameters(model)))
    mean = torch.stack(everywhere(parameters(model))).mean(0)
    model.average()
    return apart, torch.allclose(parameters(model), mean, atol=1e-7), model.local_steps


def test_average_ends_a_round_early(got) -> None:
    assert got(a_round_that_is_cut_short) == [(True, True, 0)] * 2


@on_ranks
def nothing_to_average():
    """An outer momentum would move the parameters without a step."""
    model, optimizer = local(DiLoCo, every=2)
    for i in range(2):
        update(model, optimizer, i)
    before = parameters(model)
    model.average()
    return torch.equal(before, parameters(model)), model.rounds


def test_a_round_without_a_step_is_none(got) -> None:
    assert got(nothing_to_average) == [(True, 1)] * 2


@on_ranks
def the_outer_step_goes_the_way_the_ranks_went():
    """With momentum 0 and a step of 0.5, the parameters end half way between where they were and the ranks' mean."""
    model, optimizer = local(DiLoCo, every=3, outer_lr=0.5, outer_momentum=0.0)
    before = parameters(model)
    for i in range(3):
        if i == 2:
            backward(model, i)
            model.finish_gradient_synchronization()
            model.every = 9  # keep the round open for a look at where the ranks are
            optimizer.step()
        else:
            update(model, optimizer, i)
    mean = torch.stack(everywhere(parameters(model))).mean(0)
    model.average()
    return torch.allclose(parameters(model), (before + mean) / 2, atol=1e-6) and not torch.allclose(before, mean)


def test_the_pseudo_gradient_has_the_right_sign(got) -> None:
    assert got(the_outer_step_goes_the_way_the_ranks_went) == [True, True]


@on_ranks
def loaded_after_wrapping():
    """Other weights, loaded into the module before the first round and between two: the round begins there."""
    model, optimizer = local(DiLoCo, make=lambda p: optim.SGD(p, lr=0.0), every=2, outer_lr=0.5, outer_momentum=0.0)
    out = []
    for value in (3.0, 7.0):
        model.module.load_state_dict({n: torch.full_like(t, value) for n, t in model.module.state_dict().items()})
        for i in range(2):
            update(model, optimizer, i)
        out.append(bool((parameters(model) == value).all()))
    return out


def test_a_round_begins_where_the_parameters_are(got) -> None:
    assert got(loaded_after_wrapping) == [[True, True]] * 2


@on_ranks
def resumed():
    """Saved on each rank after 5 steps, inside the second round of 3."""
    out = []
    for kind, make in ((LocalSGD, make_optimizer), (DiLoCo, adamw)):
        whole = local(kind, every=3, make=make)
        first = local(kind, every=3, make=make)
        for i in range(5):
            update(*whole, i)
            update(*first, i)
        saved = copy.deepcopy((first[0].state_dict(), first[1].state_dict()))
        second = local(kind, every=3, make=make)
        for part, checkpoint in zip(second, saved):
            part.load_state_dict(checkpoint)
        for i in range(5, 10):
            update(*whole, i)
            update(*first, i)
            update(*second, i)
        out.append([torch.equal(parameters(whole[0]), parameters(other[0])) for other in (first, second)])
    return out


def test_a_resumed_run_equals_one_without_interruption(got) -> None:
    assert got(resumed) == [[[True, True]] * 2] * 2


@on_ranks
def faults():
    out = []
    model, optimizer = local(every=3)
    for i in range(3 + odd_one()):
        backward(model, i)
        model.finish_gradient_synchronization()
        if not (odd_one() and i == 1):
            out += [error_of(optimizer.step)]
    model, optimizer = local(every=5)
    for i in range(3 - odd_one()):
        update(model, optimizer, i)
    out.append(error_of(model.average))
    model, optimizer = local(model=Branches, every=1, average_state=True)
    model(torch.full((4, 6), 1.0 if odd_one() else -1.0)).sum().backward()  # `left` on rank 1, `right` on rank 0
    if odd_one():
        model.module.out.bias.grad = None
    model.finish_gradient_synchronization()
    out.append(error_of(optimizer.step))
    model = LocalSGD(model_of(), every=2)
    for action in (optim.SGD(model.parameters(), lr=0.1).step, lambda: LocalSGD(model_of(), every=0)):
        try:
            action()
        except (RuntimeError, ValueError) as error:
            out.append(str(error))
    return [text for text in out if text]


def test_a_rank_with_other_local_steps_is_named_on_all_ranks(got) -> None:
    for skipped, short, stateless, unseen, none in got(faults):
        assert "rank 1 did not make the same local steps" in skipped and "rank 1: 3 steps in 4 windows" in skipped
        assert "did not make the same local steps" in short
        assert "rank 0: 3 steps in 3 windows" in short and "rank 1: 2 steps in 2 windows" in short
        assert "has state for other parameters" in stateless
        assert "take_optimizer" in unseen and "every=0" in none


def other_settings() -> str:
    try:
        DiLoCo(model_of(), outer_lr=0.7 if dist.get_rank() else 0.5)
    except SynchronizationError as error:
        return str(error)
    return ""


def test_other_outer_settings_are_refused() -> None:
    assert all("rank 1 and 2" in said or "ranks 1 and 2" in said
               for said in run(other_settings, ranks=3, fabric="loopback"))
