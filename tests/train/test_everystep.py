"""EveryStep: the reference's parameters on 1 to 4 ranks, N times the traffic, and never a buffer touched in flight."""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from course_lib.launch import Fabric, run
from course_lib.record import recording
from course_lib.train import EveryStep, StockDDP, SynchronizationError, accumulate, bucketed, emulated, everystep
from course_lib.train.data import count_of
from course_lib.train.reducer import Reducer
from course_lib.train.reference import reference
from tests.train.cases import CASES, Branches, Odd, Tied, make_model, make_optimizer, mlp, state, windows
from tests.train.on_ranks import SMALL, alone, backward, grads, inputs, model_of, same, sent, together
from tests.train.trainer import Bomb, Mined, error_of, odd_one, parameters

# parameters, against one process


def train(case_name: str, micro_steps: int, op: str) -> dict[str, torch.Tensor]:
    case, rank = CASES[case_name], dist.get_rank()
    model = EveryStep(make_model(case_name, seed=rank), SMALL, SMALL / 4, op=op, find_unused=case.unused)
    optimizer = make_optimizer(p for p in model.parameters() if p.requires_grad)
    for window in windows(case_name, rank, micro_steps):
        counts = [count_of(b) for b in window] if case.ragged else None
        accumulate(model, window, case.loss_of, case.normalise, counts, op, every=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=micro_steps > 1 or case.unused)
    return state(model.module)


def everything(micro_steps: int) -> dict:
    torch.set_num_threads(1)
    return {(case, op): train(case, micro_steps, op) for case in CASES for op in ("mean", "sum")}


RUNS = [(2, 4), (3, 3), *(pytest.param(run_, marks=pytest.mark.slow) for run_ in ((1, 3), (2, 1), (4, 3)))]


@pytest.fixture(scope="module", params=RUNS, ids=lambda r: f"{r[0]} ranks, N={r[1]}")
def trained(request) -> tuple[int, int, list[dict]]:
    ranks, micro_steps = request.param
    return ranks, micro_steps, run(everything, micro_steps, ranks=ranks, fabric="loopback")


@pytest.mark.parametrize("case", CASES)
def test_parameters_equal_the_reference(case: str, trained: tuple[int, int, list[dict]]) -> None:
    ranks, micro_steps, results = trained
    per_rank = [windows(case, r, micro_steps) for r in range(ranks)]
    want = reference(lambda: make_model(case), list(zip(*per_rank)), CASES[case].loss_of, make_optimizer,
                     CASES[case].normalise)
    assert any(not torch.equal(want[n], t) for n, t in state(make_model(case)).items()), "nothing was learnt"
    for op in ("mean", "sum"):
        for rank, result in enumerate(results):
            for name, tensor in want.items():
                where = f"{op}, {name}, rank {rank}"
                torch.testing.assert_close(result[case, op][name], results[0][case, op][name], rtol=0, atol=0,
                                           msg=f"replicas: {where}")
                torch.testing.assert_close(result[case, op][name], tensor, rtol=1e-5, atol=CASES[case].atol,
                                           msg=lambda m, where=where: f"{where}: {m}")


# what a window is

on_ranks, got = together()


def window(model, silent: str) -> None:
    """Micro-steps 0, 1, 2, …: those marked `-` under no_sync, those marked `s` sent."""
    for i, mark in enumerate(silent):
        with model.no_sync() if mark == "-" else nullcontext():
            backward(model, i)
    model.finish_gradient_synchronization()


@on_ranks
def traffic():
    out = {}
    for marks in ("s", "ss", "ssss", "--s", "s--s", "-s-s"):
        model = EveryStep(model_of(), SMALL, None)
        window(model, "s")  # rebuilds the buckets
        model.zero_grad()
        sent()
        window(model, marks)
        out[marks] = *sent(), len(model.buckets), same(grads(model), alone(mlp, list(range(len(marks))), "mean"))
    return out


def test_every_sent_micro_step_sends_every_bucket_and_no_other_does(got) -> None:
    full = sum(p.numel() for p in mlp().parameters()) * 4  # a ring of two sends as much as the gradient has
    for rank in got(traffic):
        for marks, (calls, nbytes, buckets, right) in rank.items():
            assert buckets > 1 and right, marks
            assert (calls, nbytes) == (marks.count("s") * buckets, marks.count("s") * full), marks


@on_ranks
def against_ddp():
    pair = []
    for model in (EveryStep(model_of(Odd), SMALL), StockDDP(model_of(Odd))):
        for i in range(4):
            backward(model, i)
        model.finish_gradient_synchronization()
        pair.append(grads(model))
    return same(*pair)


def test_the_gradient_is_ddps(got) -> None:
    assert got(against_ddp) == [True, True]


@on_ranks
def nothing_is_counted_twice():
    out = {}
    for op in ("mean", "sum"):
        model = EveryStep(model_of(Tied), SMALL, op=op)
        window(model, "sss")
        out[op, "a window"] = same(grads(model), alone(Tied, [0, 1, 2], op))
        window(model, "-ss")
        out[op, "without zero_grad"] = same(grads(model), alone(Tied, [0, 1, 2, 0, 1, 2], op))
        loss = model(inputs(6)).square().sum()
        model.zero_grad(set_to_none=False)
        loss.backward()
        backward(model, 7)
        model.finish_gradient_synchronization()
        out[op, "zeroed after the first forward"] = same(grads(model), alone(Tied, [6, 7], op))
        model.zero_grad()
        (model(inputs(0)).square().sum() + model(inputs(1)).square().sum()).backward()
        backward(model, 2)
        model(inputs(3))
        model.finish_gradient_synchronization()
        out[op, "two forwards, and one without a backward"] = same(grads(model), alone(Tied, [0, 1, 2], op))
    return out


def test_a_sum_over_ranks_would_show_what_is_counted_twice(got) -> None:
    for rank in got(nothing_is_counted_twice):
        assert all(rank.values()), [k for k, ok in rank.items() if not ok]


@on_ranks
def unused():
    """`left` runs in even micro-steps on rank 0 and odd ones on rank 1, `never` on no rank."""
    out = {}
    for op in ("mean", "sum"):
        model = EveryStep(model_of(Branches), 0.0001, op=op, find_unused=True)
        want = model_of(Branches)
        for i in range(3):
            for rank in range(2):
                x = torch.full((4, 6), 1.0 if i % 2 == rank else -1.0)
                (want(x).sum() / (2 if op == "mean" else 1)).backward()
                if rank == dist.get_rank():
                    model(x).sum().backward()
        model.finish_gradient_synchronization()
        out[op] = same(grads(model), grads(want)), [n for n, p in model.module.named_parameters() if p.grad is None]
    return out


def test_used_on_any_rank_in_any_micro_step_is_used(got) -> None:
    for rank in got(unused):
        assert set(map(repr, rank.values())) == {repr((True, ["never.weight", "never.bias"]))}, rank


class Watched(Reducer):
    """Notes which set each launch is of, and for each wait whether the bucket was changed since its launch."""

    launches, touched = [], []

    def _launch(self, bucket):
        super()._launch(bucket)
        self.launches.append(id(self))
        bucket.launched_as = bucket.flat._version

    def wait(self):
        self.touched.extend(bucket.flat._version != bucket.launched_as for bucket, _ in self.flying)
        super().wait()


@on_ranks
def sets_in_turn():
    bucketed.Reducer = everystep.Reducer = Watched
    model = EveryStep(model_of(), SMALL, rebuild=False)
    bucketed.Reducer = everystep.Reducer = Reducer
    window(model, "sssss")
    sets = Watched.launches[::len(model.buckets)]
    return [one == sets[0] for one in sets], Watched.touched


def test_the_sets_take_turns_and_one_on_the_wire_is_left_alone(got) -> None:
    for turns, touched in got(sets_in_turn):
        assert turns == [True, False, True, False, True]
        assert len(touched) >= 10 and not any(touched)


@on_ranks
def memory():
    model = EveryStep(model_of(), SMALL)
    window(model, "sss")
    sets = (model.reducer, model._resting)
    inside = {b.flat.untyped_storage().data_ptr() for b in model.reducer.buckets}
    return ([sum(b.bytes for b in r.buckets) for r in sets],
            all(p.grad.untyped_storage().data_ptr() in inside for p in model.parameters()))


def test_it_takes_two_gradients_and_no_third(got) -> None:
    full = sum(p.numel() for p in mlp().parameters()) * 4
    assert got(memory) == [([full, full], True)] * 2


# faults: an error that names the rank, on every rank, and training goes on


def faults() -> dict:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return {fault.__name__: _faulty(fault) for fault in (
        raises_in_the_second_backward, skips_the_third_backward, one_micro_step_under_no_sync, ends_under_no_sync,
        two_backwards_after_two_forwards, steps_between_micro_steps)}


def _faulty(fault) -> tuple[str, bool]:
    torch.manual_seed(0)
    model = EveryStep(Mined(), SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update() -> None:
        window(model, "sss")
        optimizer.step()
        optimizer.zero_grad()

    update()
    said = error_of(lambda: fault(model, optimizer))
    Bomb.armed = False
    before = parameters(model)
    optimizer.zero_grad()
    update()
    update()
    mine = parameters(model)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    healthy = all(torch.equal(t, mine) for t in theirs) and not torch.equal(before, mine)
    want = model_of(Mined)
    want.load_state_dict(model.module.state_dict())
    window(model, "ss")
    for i in range(2):
        for rank in range(dist.get_world_size()):
            (want(inputs(i, rank)).square().sum() / dist.get_world_size()).backward()
    return said, healthy and same(grads(model), grads(want))


def raises_in_the_second_backward(model, optimizer):
    backward(model, 0)
    loss = model(inputs(1)).square().sum()
    Bomb.armed = odd_one()
    loss.backward()
    backward(model, 2)


def skips_the_third_backward(model, optimizer):
    backward(model, 0)
    backward(model, 1)
    loss = model(inputs(2)).square().sum()
    if not odd_one():
        loss.backward()
    model.finish_gradient_synchronization()


def one_micro_step_under_no_sync(model, optimizer):
    backward(model, 0)
    with model.no_sync() if odd_one() else nullcontext():
        backward(model, 1)
    backward(model, 2)
    model.finish_gradient_synchronization()


def ends_under_no_sync(model, optimizer):
    window(model, "ss-")


def two_backwards_after_two_forwards(model, optimizer):
    backward(model, 0)
    first, second = model(inputs(1)).sum(), model(inputs(2)).sum()
    first.backward()
    second.backward()


def steps_between_micro_steps(model, optimizer):
    backward(model, 0)
    if odd_one():
        optimizer.step()
    backward(model, 1)


@pytest.fixture(scope="module")
def faulty() -> list[dict]:
    return run(faults, ranks=3, fabric="loopback")


@pytest.mark.parametrize(("name", "others", "first"), [
    ("raises_in_the_second_backward", r"window 1: an exception ended the backward pass of rank 1", "Boom"),
    ("skips_the_third_backward", r"window 1: rank 1 skipped a backward pass .*rank 1: 2 backward of 3 forward", None),
    ("one_micro_step_under_no_sync", r"window 1: the ranks synchronised different micro-steps \(rank 0: 2 of 2, "
     r"rank 1: 2 of 3", None),
    ("ends_under_no_sync", r"the last forward pass of ranks 0, 1 and 2 ran under no_sync", None),
    ("two_backwards_after_two_forwards", r"another gradient while its bucket was on the wire", None),
    ("steps_between_micro_steps", r"the optimizer of rank 1 was about to step before finish", None),
])
def test_a_fault_is_an_error_on_every_rank_and_training_goes_on(name, others, first, faulty) -> None:
    for rank, (said, goes_on) in enumerate(result[name] for result in faulty):
        pattern = first if first and rank == 1 else others
        assert re.search(pattern, said), f"rank {rank}: {said!r}"
        assert goes_on, f"rank {rank} cannot go on, or its gradients are wrong afterwards"


def wrapped_otherwise() -> str:
    return error_of(lambda: EveryStep(mlp(), bucket_mb=SMALL if odd_one() else 25))


def test_other_settings_on_one_rank_are_refused() -> None:
    for said in run(wrapped_otherwise, ranks=2, fabric="loopback"):
        assert said.startswith(SynchronizationError.__name__) and "rank 1 wrapped another model" in said


# under compute


def overlapped():
    """One micro-step's buckets travel while the next computes; nothing waits between."""
    model = EveryStep(emulated.equal(4, 0.25, 5, 10), bucket_mb=0.5, first_bucket_mb=None)
    for _ in range(2):
        with recording(dist.get_rank()) as recorder, recorder.measure_step(0):
            for _ in range(3):
                model(torch.ones(4)).square().mean().backward()
            model.finish_gradient_synchronization()
        model.zero_grad()
    return recorder.timeline()


def test_the_last_bucket_of_a_micro_step_travels_under_the_next_forward() -> None:
    for timeline in run(overlapped, ranks=2, fabric=Fabric(gbit=0.4, latency_us=500, kind="paced")):
        rank = timeline.ranks[0]
        comm = [s for s in timeline.select(rank=rank, kind="comm") if s.name == "all_reduce"]
        forwards = [s for s in timeline.select(kind="compute") if s.name == "forward layer 0"]
        backwards = [s for s in timeline.select(kind="compute") if s.name == "backward layer 0"]
        assert len(comm) == 6 and len(forwards) == 3
        assert comm[1].stop > forwards[1].start, "the second bucket had left the wire before the next forward"
        assert forwards[1].start - backwards[0].stop < 8e6, "the next forward waited for the wire"
