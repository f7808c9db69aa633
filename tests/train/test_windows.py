"""What a window is: which backward is sent, how often, how many bytes, and what `.grad` is afterwards."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

from course_lib import record
from course_lib.launch import run
from course_lib.train.bucketed import Bucketed
from course_lib.train.ddp import StockDDP, wrap
from course_lib.train.nosync import NoSync
from course_lib.train.serial import SerialAllReduce
from tests.train.cases import Branches, Odd, Tied, mlp, tiny_emulated

RANKS = 2
SMALL = 0.0004
OURS = {"serial": ("serial", {}), "serial flat": ("serial", {"flat": True}), "no_sync": ("no_sync", {}),
        "bucketed": ("bucketed", {"bucket_mb": SMALL}),
        "bucketed copies": ("bucketed", {"bucket_mb": SMALL, "gradient_as_bucket_view": False})}
CHECKS = {}


def on_ranks(check):
    """Run the function on all ranks, together with all others of this file; its test reads what it returned."""
    CHECKS[check.__name__] = check
    return check


def all_checks() -> dict:
    torch.set_num_threads(1)
    return {name: check() for name, check in CHECKS.items()}


@pytest.fixture(scope="module")
def got():
    """The results of a check, one a rank."""
    results = run(all_checks, ranks=RANKS, fabric="loopback")
    return lambda check: [r[check.__name__] for r in results]


def model_of(kind=mlp, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def inputs(i: int = 0, rank: int | None = None) -> torch.Tensor:
    """Batch i of a rank: (4, 6)."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * i + rank))


def backward(model: nn.Module, i: int = 0) -> None:
    model(inputs(i)).square().sum().backward()


def grads(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def alone(kind, batches: list[int], op: str, ranks: int = RANKS) -> list[torch.Tensor]:
    """The gradient one process finds for these batches of all ranks."""
    model = model_of(kind)
    for i in batches:
        for rank in range(ranks):
            (model(inputs(i, rank)).square().sum() / (ranks if op == "mean" else 1)).backward()
    return grads(model)


def same(a: list, b: list, tolerance: float = 1e-5) -> bool:
    return all((x is None and y is None) or torch.allclose(x, y, rtol=tolerance, atol=tolerance) for x, y in zip(a, b))


def sent() -> tuple[int, float]:
    """All-reduces and their bytes (ring formula) since the last call."""
    traffic = dist.group.WORLD.traffic
    out = traffic.calls["all_reduce"], traffic.bytes["all_reduce"]
    traffic.reset()
    return out


@on_ranks
def forward_decides():
    out = {}
    for name in ("serial flat", "no_sync", "bucketed one"):
        model = {"serial flat": lambda: SerialAllReduce(model_of(), flat=True), "no_sync": lambda: NoSync(model_of()),
                 "bucketed one": lambda: Bucketed(model_of())}[name]()
        for case, (forward_inside, backward_inside) in {"backward only": (False, True), "forward only": (True, False),
                                                        "both": (True, True)}.items():
            sent()
            with model.no_sync() if forward_inside else nullcontext():
                loss = model(inputs()).sum()
            with model.no_sync() if backward_inside else nullcontext():
                loss.backward()
            try:
                model.finish_gradient_synchronization()
                said = ""
            except RuntimeError as error:
                said = str(error)
            out[name, case] = sent()[0], said
    return out


def test_the_forward_decides(got) -> None:
    """facts.md, F3; and a window of which nothing was sent is not finished in silence."""
    for rank in got(forward_decides):
        for (name, case), (calls, said) in rank.items():
            assert calls == (1 if case == "backward only" else 0), (name, case)
            assert ("under no_sync()" in said) == (case != "backward only"), (name, case, said)


@on_ranks
def no_sync_and_exceptions():
    model = Bucketed(model_of())
    try:
        with model.no_sync(), model.no_sync():
            raise KeyError
    except KeyError:
        pass
    sent()
    backward(model)
    model.finish_gradient_synchronization()
    return sent()[0]


def test_no_sync_ends_when_an_exception_leaves_it(got) -> None:
    assert got(no_sync_and_exceptions) == [1, 1]


@on_ranks
def collectives():
    out = {}
    layouts = {**OURS, "ddp": ("ddp", {"bucket_mb": SMALL, "first_bucket_mb": None}),
               "bucketed like ddp": ("bucketed", {"bucket_mb": SMALL, "first_bucket_mb": None})}
    for name, (strategy, options) in layouts.items():
        dist.group.WORLD.traffic.reset()
        model = wrap(strategy, model_of(), **options)
        broadcasts = dist.group.WORLD.traffic.calls["broadcast"]
        for _ in range(2):  # DDP's first iteration has a layout of its own
            sent()
            for i in range(3):
                with model.no_sync() if i < 2 else nullcontext():
                    backward(model, i)
            model.finish_gradient_synchronization()
        out[name] = *sent(), broadcasts
    return out


def test_collectives_and_bytes_are_what_the_strategy_says(got) -> None:
    parameters = list(mlp().parameters())
    full = sum(p.numel() for p in parameters) * 4  # bytes of one gradient; a ring of 2 sends it once
    for rank in got(collectives):
        assert rank["serial"] == (len(parameters), full, 1)
        assert rank["serial flat"] == rank["no_sync"] == (1, full, 1)
        assert rank["bucketed"][1] == rank["ddp"][1] == full
        assert rank["bucketed"][0] == 2 and rank["bucketed like ddp"][0] == rank["ddp"][0]


@on_ranks
def serial_every_micro_step():
    model = SerialAllReduce(model_of())
    sent()
    for i in range(3):
        backward(model, i)
    model.finish_gradient_synchronization()
    return *sent(), same(grads(model), alone(mlp, [0, 1, 2], "mean"))


def test_serial_sends_everything_after_every_micro_step(got) -> None:
    full = sum(p.numel() for p in mlp().parameters()) * 4
    assert got(serial_every_micro_step) == [(18, 3 * full, True)] * RANKS


@on_ranks
def synchronised_again():
    """Reduce, accumulate onto it, reduce again: W·old + Σ new is the mistake that a mean hides."""
    out = {}
    for name, (strategy, options) in OURS.items():
        for op in ("mean", "sum"):
            model = wrap(strategy, model_of(), op=op, **options)
            backward(model, 0)
            backward(model, 1)
            with model.no_sync():
                backward(model, 2)
            backward(model, 3)
            model.finish_gradient_synchronization()
            out[name, op, "in one window"] = same(grads(model), alone(mlp, [0, 1, 2, 3], op))
            with model.no_sync():
                backward(model, 4)
            backward(model, 5)
            model.finish_gradient_synchronization()
            out[name, op, "without zero_grad"] = same(grads(model), alone(mlp, [0, 1, 2, 3, 4, 5], op))
            loss = model(inputs(6)).square().sum()
            model.zero_grad(set_to_none=False)
            loss.backward()
            model.finish_gradient_synchronization()
            out[name, op, "zeroed after forward"] = same(grads(model), alone(mlp, [6], op))
    return out


def test_a_second_synchronisation_adds_only_what_is_new(got) -> None:
    for rank in got(synchronised_again):
        assert all(rank.values()), [k for k, ok in rank.items() if not ok]


@on_ranks
def left_alone_the_second_time():
    """A parameter that the second micro-step does not use keeps the sum of the first."""
    out = {}
    ones = torch.ones(4, 6)
    want = model_of(Branches)
    for x in (ones, -ones):
        (RANKS * want(x).sum()).backward()
    for name, (strategy, options) in OURS.items():
        if strategy == "bucketed":
            options = {**options, "find_unused": True}
        model = wrap(strategy, model_of(Branches), op="sum", **options)
        model(ones).sum().backward()
        model(-ones).sum().backward()
        model.finish_gradient_synchronization()
        out[name] = same(grads(model), grads(want))
    return out


def test_what_the_second_synchronisation_does_not_touch_stays_as_it_is(got) -> None:
    for rank in got(left_alone_the_second_time):
        assert all(rank.values()), rank


@on_ranks
def views():
    out = {}
    for set_to_none in (True, False):
        for as_view in (True, False):
            model = Bucketed(model_of(), bucket_mb=SMALL, gradient_as_bucket_view=as_view)
            history, pointers = [], []
            for i in range(4):
                with model.no_sync():
                    backward(model, 10 * i)
                backward(model, i)
                model.finish_gradient_synchronization()
                history += grads(model)
                storages = {b.flat.untyped_storage().data_ptr() for b in model.reducer.buckets}
                inside = all(p.grad.untyped_storage().data_ptr() in storages for p in model.parameters())
                pointers.append((inside, [p.grad.data_ptr() for p in model.parameters()]))
                model.zero_grad(set_to_none=set_to_none)
            out[set_to_none, as_view] = history, pointers
    return out


def test_zero_grad_either_way_leaves_views_and_the_same_numbers(got) -> None:
    """facts.md, F5."""
    for rank in got(views):
        first = rank[True, True][0]
        for (_, as_view), (history, pointers) in rank.items():
            assert same(history, first, 0)
            assert all(inside == as_view for inside, _ in pointers)
            assert not as_view or pointers[1] == pointers[2] == pointers[3]


@on_ranks
def rebuild():
    out = {}
    model = Bucketed(model_of(Odd), bucket_mb=0.0002, first_bucket_mb=None)
    before = model.buckets
    backward(model)
    model.finish_gradient_synchronization()
    out["registration is not use"] = before, model.buckets, same(grads(model), alone(Odd, [0], "mean"))
    fixed = Bucketed(model_of(Odd), bucket_mb=0.0002, rebuild=False)
    backward(fixed)
    fixed.finish_gradient_synchronization()
    out["kept"] = fixed.buckets, [n for n, _, _ in fixed.ready_times()]
    odd = Bucketed(_TwoOrders(), bucket_mb=1e-5)
    for i in range(2):
        odd(inputs(i)).sum().backward()
        odd.finish_gradient_synchronization()
    out["ranks see different orders"] = odd.buckets, [n for n, _, _ in odd.ready_times()], grads(odd)
    return out


class _TwoOrders(nn.Module):
    """Rank 1 runs its layers the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = model_of(lambda: nn.Linear(6, 6)), model_of(lambda: nn.Linear(6, 6), 1)

    def forward(self, x):
        first, second = (self.a, self.b) if dist.get_rank() == 0 else (self.b, self.a)
        return second(torch.tanh(first(x)))


def test_the_order_is_rebuilt_from_what_rank_0_saw(got) -> None:
    rank0, rank1 = got(rebuild)
    before, after, right = rank0["registration is not use"]
    assert right and before != after
    assert before[0][0] == "middle.bias" and after[0][0] == "empty"
    assert [b for b in after if any(n.startswith("first.") for n in b)] == after[-1:]
    kept, ready = rank0["kept"]
    assert kept[0][0] == "middle.bias" and ready[0] == "empty"
    (buckets0, seen0, grads0), (buckets1, seen1, grads1) = (r["ranks see different orders"] for r in (rank0, rank1))
    assert buckets0 == buckets1 == [[name] for name in seen0] and seen1 != seen0
    assert same(grads0, grads1, 0)


@on_ranks
def more_than_one_use():
    out = {}
    model = Bucketed(model_of(Tied), bucket_mb=0.0001)
    (model(inputs(0)).square().sum() + model(inputs(1)).square().sum()).backward()
    model.finish_gradient_synchronization()
    out["two forwards, one backward"] = same(grads(model), alone(Tied, [0, 1], "mean"))
    out["tied once"] = sorted(n for b in model.buckets for n in b) == sorted(n for n, _ in Tied().named_parameters())
    model = Bucketed(model_of(), bucket_mb=SMALL)
    checkpoint(model, inputs(0), use_reentrant=False).square().sum().backward()
    model.finish_gradient_synchronization()
    out["the whole model checkpointed"] = same(grads(model), alone(mlp, [0], "mean"))
    sent()
    with model.no_sync():
        loss = checkpoint(model, inputs(1), use_reentrant=False).square().sum()
    loss.backward()
    out["its second forward decides nothing"] = sent()[0] == 0
    backward(model, 2)
    with torch.no_grad():
        model(inputs(2))
    model.finish_gradient_synchronization()
    model(inputs(3))
    out["forwards without backward"] = same(grads(model), alone(mlp, [0, 1, 2], "mean"))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return out


def test_parameters_used_twice_and_forwards_beside_the_window(got) -> None:
    for rank in got(more_than_one_use):
        assert all(rank.values()), rank


@on_ranks
def plans():
    tied = Bucketed(model_of(Tied), plan=[["out.weight", "out.bias", "back.bias", "back.weight"],
                                          ["there.bias", "twice.weight", "twice.bias"]])
    backward(tied)
    sent()
    tied.finish_gradient_synchronization()
    backward(tied, 1)
    tied.finish_gradient_synchronization()
    return tied.buckets, sent()[0], tied.bucket_bytes


def test_a_plan_is_followed_and_never_rebuilt(got) -> None:
    for buckets, calls, sizes in got(plans):
        assert buckets == [["out.weight", "out.bias", "back.bias", "there.weight"],
                           ["there.bias", "twice.weight", "twice.bias"]]
        assert calls == 2 and sizes == [4 * (6 + 1 + 6 + 36), 4 * (6 + 36 + 6)]


@on_ranks
def unused():
    model = Bucketed(model_of(Branches), bucket_mb=0.0001, find_unused=True)
    x = inputs()
    x[0, 0] = 1.0 if dist.get_rank() == 0 else -1.0
    with model.no_sync():  # rank 0 uses left in the first micro-step only, rank 1 right only in the second
        model(torch.ones(4, 6)).sum().backward()
    model(x if dist.get_rank() else -torch.ones(4, 6)).sum().backward()
    model.finish_gradient_synchronization()
    return [(n, p.grad) for n, p in model.module.named_parameters()]


def test_used_on_any_rank_in_any_micro_step_is_used(got) -> None:
    """facts.md, F8: the used-set is the union over the window and over ranks."""
    rank0, rank1 = (dict(r) for r in got(unused))
    assert [n for n, g in rank0.items() if g is None] == ["never.weight", "never.bias"]
    assert [n for n, g in rank1.items() if g is None] == ["never.weight", "never.bias"]
    assert all(torch.equal(rank0[n], rank1[n]) for n in rank0 if rank0[n] is not None)


@on_ranks
def comm_hooks():
    out = {}
    seen = []

    def spy(state, bucket):
        seen.append((state, bucket.index(), bucket.is_last(), len(bucket.gradients()), len(bucket.parameters()),
                     bucket.buffer().numel()))
        return default_hooks.allreduce_hook(None, bucket)

    makers = {"mean": lambda c: c(model_of()),
              "all-reduce": lambda c: c(model_of(), comm_hook=default_hooks.allreduce_hook),
              "fp16": lambda c: c(model_of(), comm_hook=default_hooks.fp16_compress_hook)}
    for name, make in makers.items():
        pair = []
        for model_class in (Bucketed, StockDDP):
            model = make(model_class)
            for i in range(3):
                backward(model, i)
                model.finish_gradient_synchronization()
            pair.append(grads(model))
        out[name] = same(*pair, 1e-3 if name == "fp16" else 1e-5)
    model = Bucketed(model_of(), bucket_mb=SMALL, first_bucket_mb=None, comm_hook=spy, hook_state="state")
    backward(model)
    model.finish_gradient_synchronization()
    out["spy"] = seen
    return out


def test_comm_hooks_of_ddp_run_unchanged(got) -> None:
    for rank in got(comm_hooks):
        seen = rank.pop("spy")
        assert all(rank.values()), rank
        assert [s[:3] for s in seen] == [("state", 0, False), ("state", 1, True)]
        assert sum(s[3] for s in seen) == sum(s[4] for s in seen) == 6
        assert sum(s[5] for s in seen) == sum(p.numel() for p in mlp().parameters())


@on_ranks
def half_precision_range():
    """Two gradients of 40000 overflow float16 when they are summed before they are divided."""
    out = {}
    for name, (strategy, options) in OURS.items():
        model = wrap(strategy, nn.Linear(1, 1, bias=False).half(), **options)
        model(torch.full((1, 1), 40000.0).half()).sum().backward()
        model.finish_gradient_synchronization()
        out[name] = float(model.module.weight.grad)
    return out


def test_division_comes_before_the_sum(got) -> None:
    for rank in got(half_precision_range):
        assert set(rank.values()) == {40000.0}, rank


@on_ranks
def recorded():
    model = Bucketed(tiny_emulated(), bucket_mb=0.001, first_bucket_mb=None)
    sizes = model.bucket_bytes
    with record.recording(dist.get_rank()) as recorder, recorder.measure_step(0):
        model(inputs()[:, 0]).sum().backward()
        model.finish_gradient_synchronization()
    return recorder.timeline(), sizes


def test_fills_and_transfers_carry_their_bucket(got) -> None:
    for timeline, sizes in got(recorded):
        fills, comms = timeline.select(kind="fill"), timeline.select(kind="comm")
        assert [s.bucket for s in fills] == [s.bucket for s in comms] == list(range(len(sizes)))
        assert [s.bytes for s in fills] == [s.bytes for s in comms] == sizes
        assert all(f.stop <= c.start for f, c in zip(fills, comms))
        assert {s.step for s in timeline} == {0}


@on_ranks
def wrapped_again():
    module = model_of()
    old = Bucketed(module)
    new = NoSync(module)
    try:
        old(inputs())
        said = ""
    except RuntimeError as error:
        said = str(error)
    sent()
    backward(new)
    new.finish_gradient_synchronization()
    calls = sent()[0]
    new.close()
    del old, new
    backward(module)
    return said, calls, [len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()]


def test_wrapping_again_takes_over(got) -> None:
    for said, calls, hooks in got(wrapped_again):
        assert "wrapped again" in said and calls == 1 and set(hooks) == {0}


def test_outside_a_run_it_says_where_to_be() -> None:
    with pytest.raises(RuntimeError, match=r"construct it inside the function given to launch\.run"):
        Bucketed(mlp())


@on_ranks
def refusals():
    out = {}

    def refused(name, make) -> None:
        try:
            make()
            out[name] = ""
        except (ValueError, RuntimeError) as error:
            out[name] = str(error)

    refused("size", lambda: Bucketed(mlp(), bucket_mb=0))
    refused("op", lambda: NoSync(mlp(), op="max"))
    refused("sum with hook", lambda: Bucketed(mlp(), op="sum", comm_hook=default_hooks.allreduce_hook))
    refused("nothing to train", lambda: Bucketed(mlp().requires_grad_(False)))
    refused("sparse", lambda: Bucketed(nn.Embedding(3, 2, sparse=True)))
    refused("lazy", lambda: Bucketed(nn.LazyLinear(2)))
    refused("strategy", lambda: wrap("bucket", mlp()))
    refused("plan", lambda: Bucketed(mlp(), plan=[["0.weight"]]))
    module = mlp()
    module[0].requires_grad_(False)
    model = Bucketed(module)
    module[0].requires_grad_(True)
    refused("thawed", lambda: model(inputs()))
    return out


def test_what_cannot_be_is_refused_with_the_remedy(got) -> None:
    for said in got(refusals):
        for name, words in {"size": "above 0", "op": "'mean' or 'sum'", "sum with hook": "drop one",
                            "nothing to train": "nothing to reduce", "sparse": "sparse=False",
                            "lazy": "before wrapping", "strategy": "choose one of serial, no_sync, bucketed, ddp",
                            "plan": "leaves out", "thawed": "'0.weight' was frozen"}.items():
            assert words in said[name], (name, said[name])


@on_ranks
def detached_in_place():
    model = Bucketed(model_of(), bucket_mb=SMALL)
    for i in range(2):
        backward(model, i)
        model.finish_gradient_synchronization()
        for p in model.parameters():
            p.grad.detach_()
    return same(grads(model), alone(mlp, [0, 1], "mean"))


def test_gradients_in_buckets_may_be_detached_in_place(got) -> None:
    """facts.md, F5: DDP's may not."""
    assert got(detached_in_place) == [True] * RANKS
