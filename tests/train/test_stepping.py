"""A step per bucket: the plain step's parameters to the bit, in the right moment, and nothing global beside it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from course_lib.launch import Fabric, run
from course_lib.record import recording
from course_lib.train.bucketed import Bucketed
from course_lib.train.clip import clip_grad_norm
from course_lib.train.data import count_of
from course_lib.train.reference import reference
from course_lib.train.stepping import TOO_LATE, StepPerBucket, only
from course_lib.train.window import accumulate
from tests.train.cases import CASES, Tied, make_model, make_optimizer, mlp, state, windows
from tests.train.on_ranks import SMALL, backward, model_of, sent, together
from tests.train.trainer import Bomb, Mined, error_of, odd_one, parameters

OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.05),
    "momentum": make_optimizer,
    "nesterov foreach": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda p: optim.Adam(p, lr=0.01, foreach=False),
    "adam foreach": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.01),
    "adamw fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.01),
}


def train(case_name: str, stepping: bool, make=make_optimizer, micro_steps: int = 3, op: str = "mean",
          schedule: bool = False) -> dict:
    """Parameters, and the optimizer's state, after the windows of a case."""
    case, rank = CASES[case_name], dist.get_rank()
    kind = StepPerBucket if stepping else Bucketed
    model = kind(make_model(case_name, seed=rank), SMALL, SMALL / 4, op=op, find_unused=case.unused)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if schedule else None
    if stepping:
        model.take_optimizer(optimizer)
    for window in windows(case_name, rank, micro_steps):
        counts = [count_of(b) for b in window] if case.ragged else None
        accumulate(model, window, case.loss_of, case.normalise, counts, op)
        if not stepping:
            optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    model.close()
    return state(model.module) | {f"{i} {k}": torch.as_tensor(v) for i, entry in optimizer.state_dict()["state"].items()
                                  for k, v in entry.items() if v is not None}


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def pairs() -> dict:
    torch.set_num_threads(1)
    out = {case: (train(case, True), train(case, False)) for case in CASES}
    out |= {name: (train("tied", True, make), train("tied", False, make)) for name, make in OPTIMIZERS.items()}
    out["sum"] = train("odd sizes", True, op="sum"), train("odd sizes", False, op="sum")
    out["schedule"] = train("tied", True, schedule=True), train("tied", False, schedule=True)
    return {name: (equal(*pair), pair[0]) for name, pair in out.items()}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("ranks", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_the_plain_step_to_the_bit_and_the_reference(ranks: int) -> None:
    results = run(pairs, ranks=ranks, fabric="loopback")
    for result in results:
        assert [name for name, (same, _) in result.items() if not same] == []
    for case in CASES:
        per_rank = [windows(case, r, 3) for r in range(ranks)]
        want = reference(lambda case=case: make_model(case), list(zip(*per_rank)), CASES[case].loss_of, make_optimizer,
                         CASES[case].normalise)
        for name, tensor in want.items():
            torch.testing.assert_close(results[0][case][1][name], tensor, rtol=1e-5, atol=CASES[case].atol)


on_ranks, got = together()


def stepper(kind=mlp, make=make_optimizer, **options) -> tuple[StepPerBucket, optim.Optimizer]:
    model = StepPerBucket(model_of(kind), SMALL, **options)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    model.take_optimizer(optimizer)
    return model, optimizer


@on_ranks
def groups():
    """Weights and biases in groups of their own hyper-parameters, and in optimizers of their own."""
    def split(model):
        return ([p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2])

    def makers(model):
        weights, biases = split(model)
        yield [optim.AdamW([{"params": weights, "weight_decay": 0.3}, {"params": biases, "lr": 0.1}], lr=0.01)]
        yield [optim.SGD(weights, lr=0.05, momentum=0.9), optim.Adam(biases, lr=0.01)]

    out = []
    for which in range(2):
        results = []
        for kind in (StepPerBucket, Bucketed):
            model = kind(model_of(Tied), SMALL)
            optimizers = list(makers(model))[which]
            if kind is StepPerBucket:
                model.take_optimizer(*optimizers)
            for i in range(3):
                backward(model, i)
                model.finish_gradient_synchronization()
                for optimizer in optimizers if kind is Bucketed else ():
                    optimizer.step()
                model.zero_grad()
            results.append(parameters(model))
        out.append((torch.equal(*results), [[len(g["params"]) for g in o.param_groups] for o in optimizers]))
    return out


def test_parameter_groups_and_several_optimizers(got) -> None:
    for rank in got(groups):
        assert rank == [(True, [[3, 4]]), (True, [[3], [4]])]


@on_ranks
def moments():
    """Which parameters have changed after each micro-step, in whatever way it ran, and how often each was updated."""
    model, optimizer = stepper(Tied, lambda p: optim.Adam(p, lr=0.01))
    before, changed = parameters(model), []
    for i in range(2):
        with model.no_sync():
            backward(model, i)
        changed.append(not torch.equal(before, parameters(model)))
    backward(model, 2)  # synchronised, but the window is not at its end
    changed.append(not torch.equal(before, parameters(model)))
    backward(model, 3)
    changed.append(not torch.equal(before, parameters(model)))
    sent()
    model.finish_gradient_synchronization()
    changed.append(not torch.equal(before, parameters(model)))
    return changed, {int(s["step"]) for s in optimizer.state.values()}, len(optimizer.state), model.steps, sent()[0]


def test_one_update_at_the_end_of_the_window_and_only_there(got) -> None:
    slots = len(list(Tied().parameters()))
    for changed, counts, entries, steps, calls in got(moments):
        assert changed == [False] * 4 + [True]
        assert (counts, entries, steps, calls) == ({1}, slots, 1, 0)


@on_ranks
def a_forward_without_a_backward_comes_last():
    model, _ = stepper()
    backward(model)
    model(torch.ones(4, 6))
    model.finish_gradient_synchronization()
    plain = Bucketed(model_of(), SMALL)
    optimizer = make_optimizer(plain.parameters())
    backward(plain)
    plain.finish_gradient_synchronization()
    optimizer.step()
    return torch.equal(parameters(model), parameters(plain))


def test_buckets_that_were_waited_for_before_are_stepped_too(got) -> None:
    assert got(a_forward_without_a_backward_comes_last) == [True, True]


REFUSALS = {
    "our clipping": lambda model, optimizer: clip_grad_norm(model.parameters(), 1.0),
    "torch's clipping": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "torch's clipping by value": lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "unscaling": lambda model, optimizer: _scaler().unscale_(optimizer),
    "a scaler's step": lambda model, optimizer: _scaler().step(optimizer),
    "a NaN check": lambda model, optimizer: [torch.isfinite(p.grad).all() for p in model.parameters()],
    "optimizer.step()": lambda model, optimizer: optimizer.step(),
}


def _scaler() -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    return scaler


@on_ranks
def refusals():
    out = {}
    for name, action in REFUSALS.items():
        model, optimizer = stepper()
        backward(model)
        model.finish_gradient_synchronization()
        before = parameters(model)
        try:
            action(model, optimizer)
        except RuntimeError as error:
            out[name] = str(error), torch.equal(before, parameters(model))
    return out


def test_what_needs_all_gradients_is_refused_in_one_sentence(got) -> None:
    for rank in got(refusals):
        assert list(rank) == list(REFUSALS)
        for name, (said, unchanged) in rank.items():
            assert TOO_LATE in said and unchanged, name


@on_ranks
def step_hooks():
    """Clipping, or a scheduler, hung into the optimizer's step: it would see one bucket at a time."""
    out = []
    for name in ("register_step_pre_hook", "register_step_post_hook"):
        model, optimizer = stepper()
        handle = getattr(optimizer, name)(lambda *_: None)
        try:
            backward(model)
        except RuntimeError as error:
            out.append(str(error))
        handle.remove()
        backward(model)
        model.finish_gradient_synchronization()
    return out


def test_hooks_of_the_optimizers_step_are_refused(got) -> None:
    for rank in got(step_hooks):
        assert len(rank) == 2
        assert all("once for each bucket" in said and TOO_LATE in said for said in rank)


@on_ranks
def spent_gradients():
    """Zeroed in place, set to None, or simply left: the next window starts from nothing."""
    out = []
    for drop in (lambda o: o.zero_grad(), lambda o: o.zero_grad(set_to_none=False), lambda o: None):
        model, optimizer = stepper()
        for i in range(3):
            with model.no_sync():
                backward(model, 10 + i)
            backward(model, i)
            model.finish_gradient_synchronization()
            drop(optimizer)
        out.append(parameters(model))
    return [torch.equal(out[0], other) for other in out[1:]]


def test_a_spent_gradient_is_dropped_in_any_way(got) -> None:
    assert got(spent_gradients) == [[True, True]] * 2


@on_ranks
def misuse():
    model = StepPerBucket(model_of(), SMALL)
    stranger = nn.Parameter(torch.ones(7))
    actions = [lambda: backward(model), lambda: model.take_optimizer(optim.LBFGS(model.parameters())),
               lambda: model.take_optimizer(optim.SGD([*model.parameters(), stranger], lr=0.1)),
               lambda: StepPerBucket(model_of(), gradient_as_bucket_view=False)]
    said = []
    for action in actions:
        try:
            action()
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    return said


def test_misuse_is_refused(got) -> None:
    for rank in got(misuse):
        for said, expected in zip(rank, ["take_optimizer", "LBFGS is not known to update each parameter by itself",
                                         "shape (7,)", "leave out gradient_as_bucket_view"], strict=True):
            assert expected in said


@on_ranks
def a_backward_that_raises():
    model, optimizer = stepper(Mined)
    before = parameters(model)
    Bomb.armed = odd_one()
    first = error_of(lambda: backward(model))
    Bomb.armed = False
    second = "" if odd_one() else error_of(model.finish_gradient_synchronization)
    unchanged = torch.equal(before, parameters(model))
    optimizer.zero_grad()
    backward(model, 1)
    model.finish_gradient_synchronization()
    mine = parameters(model)
    dist.all_reduce(theirs := mine.clone())
    return first, second, unchanged, torch.equal(mine * 2, theirs) and not torch.equal(mine, before)


@pytest.mark.filterwarnings("ignore")
def test_a_failed_window_changes_no_parameter(got) -> None:
    (_, said, unchanged0, on0), (boom, _, unchanged1, on1) = got(a_backward_that_raises)
    assert "Boom" in boom and "an exception ended the backward pass of rank 1" in said
    assert unchanged0 and unchanged1 and on0 and on1


@on_ranks
def an_optimizer_that_raises():
    model, optimizer = stepper()
    backward(model)
    optimizer.param_groups[0]["lr"] = "wrong"
    return error_of(model.finish_gradient_synchronization), len(optimizer.param_groups[0]["params"])


def test_a_step_that_fails_half_way_says_so(got) -> None:
    for rank, (said, held) in enumerate(got(an_optimizer_that_raises)):
        assert f"rank {rank}, window 0: 0 of" in said and "load the last checkpoint" in said
        assert held == len(list(mlp().parameters()))


def test_only_restores_the_groups_after_an_error() -> None:
    weights = [nn.Parameter(torch.ones(i + 1)) for i in range(3)]
    optimizer = optim.SGD([{"params": weights[:2]}, {"params": weights[2:]}], lr=0.1)
    with pytest.raises(KeyError), only(optimizer, {id(weights[1])}):
        assert [[p.numel() for p in g["params"]] for g in optimizer.param_groups] == [[2], []]
        raise KeyError
    assert [len(g["params"]) for g in optimizer.param_groups] == [2, 1]


def on_a_wire() -> tuple[int, int, int]:
    """Buckets; optimizer spans that ended before the last bucket had arrived; those that began before their own had."""
    torch.set_num_threads(1)
    model, _ = stepper(lambda: nn.Sequential(*(nn.Linear(128, 128) for _ in range(6))), plan=[
        [f"{i}.weight", f"{i}.bias"] for i in reversed(range(6))])
    with recording() as recorder:
        (model(torch.ones(2, 128)).sum()).backward()
        model.finish_gradient_synchronization()
    arrived = {row[7]: row[5] for row in recorder.rows if row[1] == "comm"}
    stepped = {row[7]: (row[4], row[5]) for row in recorder.rows if row[3].startswith("optimizer")}
    last = max(arrived.values())
    return (len(stepped), sum(stop < last for _, stop in stepped.values()),
            sum(start < arrived[bucket] for bucket, (start, _) in stepped.items()))


def test_steps_hide_under_buckets_that_still_travel() -> None:
    for buckets, early, too_early in run(on_a_wire, ranks=2, fabric=Fabric(gbit=0.05, kind="paced")):
        assert (buckets, too_early) == (6, 0)
        assert early >= 4  # all but the last; one more for a busy machine
