"""Every scheme on real ranks, under our reducer and stock DDP, against numpy in one process."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from course_lib.compress import SCHEMES, OneBit, PowerSGD, TopK, hook, volumes
from course_lib.launch import Fabric, run
from course_lib.launch.fabric import shaped_works
from course_lib.train import wrap
from course_lib.train.bucket import Bucket
from tests.compress.given import OPTIONS, SHAPES, Given, flat, gradient, reference, train, wrapped_with
from tests.train import cases

needs_shaped = pytest.mark.skipif(not shaped_works(), reason="ip and tc do not work in a user namespace here")
UPDATES = range(4)
TOLERANCE = {"fp16": 2e-3, "bf16": 2e-2}


def against_numpy():
    torch.set_num_threads(1)
    rank, out, gloo = dist.get_rank(), {}, dist.new_group(backend="gloo")
    for scheme, options in OPTIONS.items():
        for name, kind, group, as_view in (("bucketed", "bucketed", None, True), ("copies", "bucketed", None, False),
                                           ("ddp", "ddp", None, True), ("ddp on plain gloo", "ddp", gloo, False)):
            model = Given()
            state = SCHEMES[scheme](model, process_group=group, **options)
            wrapped = wrapped_with(state, model, kind, process_group=group, gradient_as_bucket_view=as_view)
            out[scheme, name] = train(wrapped, rank, UPDATES), state.updates
    model = Given()
    q = PowerSGD(model, **OPTIONS["powersgd"])
    return out, {n: q._first_q(n) for n in q.factors}


@pytest.mark.parametrize("ranks", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_gradients_are_those_of_numpy_whatever_the_buckets(ranks) -> None:
    results = run(against_numpy, ranks=ranks, fabric="loopback")
    first_q = results[0][1].__getitem__
    expected = {scheme: reference(scheme, ranks, UPDATES, first_q=first_q) for scheme in OPTIONS}
    for case, (first, updates) in results[0][0].items():
        assert updates == len(UPDATES)
        for update, grads in enumerate(first):
            for name, grad in grads.items():
                want = expected[case[0]][update][name]
                scale = np.abs(want).max(initial=1e-6)
                np.testing.assert_allclose(flat(grad), want, atol=TOLERANCE.get(case[0], 1e-4) * scale,
                                           err_msg=f"{case}, update {update}, {name}")
                for other in results[1:]:
                    assert torch.equal(other[0][case][0][update][name], grad), (case, update, name)


def options_of_schemes():
    rank, out = dist.get_rank(), {}
    for name, state_of in {"onebit": lambda m: OneBit(m, error_feedback=False),
                           "topk": lambda m: TopK(m, k=0.1, error_feedback=False),
                           "momentum": lambda m: TopK(m, k=0.1, momentum=0.9)}.items():
        model = Given()
        out[name] = train(wrapped_with(state_of(model), model), rank, UPDATES)
    model = Given()
    warming = wrapped_with(TopK(model, k=0.01, warm_up=2, error_feedback=False), model)
    out["kept"] = [int(g["wide"].count_nonzero()) for g in train(warming, rank, UPDATES)]
    return out


def test_without_error_feedback_with_momentum_correction_and_with_warm_up() -> None:
    (got, _) = run(options_of_schemes, ranks=2, fabric="loopback")
    for name, scheme, more in (("onebit", "onebit", {"feedback": False}), ("topk", "topk", {"feedback": False}),
                               ("momentum", "topk", {"momentum": 0.9})):
        for grads, want in zip(got[name], reference(scheme, 2, UPDATES, **more)):
            for n in SHAPES:
                np.testing.assert_allclose(flat(grads[n]), want[n], atol=1e-5 * np.abs(want[n]).max(initial=1e-6))
    entries = 20 * 33  # two ranks choose different entries, nearly always
    for kept, share in zip(got["kept"], (0.01 ** (1 / 3), 0.01 ** (2 / 3), 0.01, 0.01)):
        assert share * entries - 1 <= kept <= 2 * share * entries + 2


def on_models():
    """All entries sent, so that the result must be the dense one, on models that are hard for reducers."""
    torch.set_num_threads(1)
    out = {}
    for name in ("tied", "frozen", "unused", "odd sizes", "bf16", "mixed types", "ragged tail"):
        case = cases.CASES[name]
        for kind in ("bucketed", "ddp"):
            grads = []
            for scheme in (None, *OPTIONS):
                model = cases.make_model(name)
                options = {"k": 1.0} if scheme == "topk" else OPTIONS.get(scheme, {})
                state = SCHEMES[scheme](model, **options) if scheme else None
                more = {"find_unused": True} if case.unused or (name == "ragged tail" and kind == "ddp") else {}
                if state is not None:
                    more |= {"comm_hook": hook, "hook_state": state}
                wrapped = wrap(kind, model, **more)
                for window in cases.windows(name, dist.get_rank(), 1):
                    wrapped.zero_grad()
                    summed, count = case.loss_of(wrapped, window[0])
                    (summed / max(1, count)).backward()
                    wrapped.finish_gradient_synchronization()
                grads.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
            out[name, kind] = dict(zip((None, *OPTIONS), grads))
    return out


def test_tied_frozen_unused_and_half_precision_parameters() -> None:
    results = run(on_models, ranks=2, fabric="loopback")
    for case, schemes in results[0].items():
        for scheme, grads in schemes.items():
            for name, grad in grads.items():
                dense = schemes[None][name]
                assert (grad is None) == (dense is None), (case, scheme, name)
                if grad is None:
                    continue
                assert torch.equal(grad, results[1][case][scheme][name]), (case, scheme, name)
                if scheme in ("topk", "bf16", "fp16"):
                    assert torch.allclose(grad, dense, rtol=0.02, atol=0.02 * float(dense.abs().sum())), (case, scheme)


def other_orders():
    """DDP and our reducer lay a gradient out as its parameter lies in memory, which is not always the order of its
    indices."""
    torch.manual_seed(0)
    x, out = torch.randn(2, 5, 6, 6), {}
    for reducer in ("ddp", "bucketed"):
        for name, state_of in {"dense": None, "topk": lambda m: TopK(m, k=1.0), "onebit": OneBit,
                               "powersgd": lambda m: PowerSGD(m, rank=99, min_saving=0.0)}.items():
            torch.manual_seed(1)
            model = torch.nn.Conv2d(5, 7, 3).to(memory_format=torch.channels_last)
            hooked = {"comm_hook": hook, "hook_state": state_of(model)} if state_of else {}
            wrapped = wrap(reducer, model, **hooked)  # a DDP that nobody holds reduces nothing
            wrapped(x).square().sum().backward()
            wrapped.finish_gradient_synchronization()
            out[reducer, name] = model.weight.grad
        turned = Given({"matrix": (30, 20)})
        turned.matrix = torch.nn.Parameter(torch.zeros(20, 30).t())
        wrapped = wrap(reducer, turned, comm_hook=hook, hook_state=PowerSGD(turned, rank=1))
        outer = torch.outer(torch.arange(30.0), torch.linspace(1, 2, 20))
        wrapped({"matrix": outer}).backward()
        wrapped.finish_gradient_synchronization()
        out[reducer, "rank 1"] = turned.matrix.grad, outer
    with pytest.raises(ValueError, match="'a' is complex, and TopK compresses real numbers"):
        TopK(Given({"a": (3,)}, torch.complex64), k=0.1)
    return out


def test_parameters_that_do_not_lie_in_the_order_of_their_indices() -> None:
    (got,) = run(other_orders, ranks=1, fabric="loopback")
    dense = got["ddp", "dense"]
    for reducer in ("ddp", "bucketed"):
        torch.testing.assert_close(got[reducer, "dense"], dense)
        torch.testing.assert_close(got[reducer, "topk"], dense)
        torch.testing.assert_close(got[reducer, "powersgd"], dense, rtol=1e-3, atol=1e-3 * float(dense.abs().max()))
        torch.testing.assert_close(got[reducer, "onebit"], torch.copysign(dense.abs().mean(), dense))
        torch.testing.assert_close(*got[reducer, "rank 1"], rtol=1e-4, atol=1e-3)


def torch_hooks():
    """The hooks of torch and ours on the same bucket, one bucket: theirs waits inside a callback."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
    shapes = {n: shape for n, shape in SHAPES.items() if math.prod(shape) > 1}  # theirs knows no scalar
    model, rank, out = Given(shapes), dist.get_rank(), {}

    def bucket(update: int) -> Bucket:
        made = Bucket(0, list(model.parameters()), last=True)
        for view, grad in zip(made.gradients(), gradient(rank, update, shapes).values()):
            view.copy_(grad)
        return made

    ours = PowerSGD(model, rank=2)
    gloo = dist.new_group(backend="gloo")  # two threads: one runs the callback, one what it waits for
    theirs = PowerSGDState(gloo, matrix_approximation_rank=2, start_powerSGD_iter=2)
    theirs.iter = 2
    theirs.q_memory_dict[0] = torch.cat([ours._first_q(n) for n in ours.factors])
    theirs.p_memory_dict[0] = torch.empty(sum(f[0] * f[2] for f in ours.factors.values()))
    pairs = {"fp16": (SCHEMES["fp16"](model), default_hooks.fp16_compress_hook, None),
             "bf16": (SCHEMES["bf16"](model), default_hooks.bf16_compress_hook, None),
             "powersgd": (ours, powerSGD_hook, theirs)}
    for name, (mine, their_hook, their_state) in pairs.items():
        out[name] = []
        for update in UPDATES:
            made = hook(mine, bucket(update)).wait().clone()
            out[name].append((made, their_hook(their_state, bucket(update)).wait()))
    # one gradient alone is out of the range of float16, its mean is not
    large = Bucket(0, [torch.nn.Parameter(torch.zeros(2))], last=True)
    large.flat.copy_(torch.tensor([1e5, 4.0]) if rank == 0 else torch.tensor([0.0, 4.0]))
    out["large"] = hook(pairs["fp16"][0], large).wait()
    return out


def test_results_are_those_of_the_hooks_of_torch() -> None:
    for got in run(torch_hooks, ranks=2, fabric="loopback"):
        for ours, theirs in got["fp16"] + got["bf16"]:
            assert torch.equal(ours, theirs)  # dividing by 2 is exact
        for ours, theirs in got["powersgd"]:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        assert got["large"].tolist() == [float(torch.tensor(5e4).half()), 4.0]


def out_of_step(plain_gloo: bool):
    """Ranks that are late at different buckets, and collectives of the user's between the phases."""
    rank = dist.get_rank()
    group = dist.new_group(backend="gloo") if plain_gloo else None
    totals = []
    for state_of in (lambda m: OneBit(m, process_group=group), lambda m: PowerSGD(m, rank=1, process_group=group)):
        shapes = {f"p{i}": (24, 40) for i in range(6)}
        model = Given(shapes)
        state = state_of(model)
        for update in range(3):
            futures = []
            for i, param in enumerate(model.parameters()):
                bucket = Bucket(i, [param], last=i == 5)
                bucket.flat.copy_(gradient(rank, update, shapes)[f"p{i}"].view(-1))
                futures.append(hook(state, bucket))
                if i % 2 == rank:
                    time.sleep(0.01)
                one = torch.ones(1)
                dist.all_reduce(one, group=group)
            totals += [float(f.wait().norm()) for f in futures]
        assert state.updates == 3
    return totals


@pytest.mark.parametrize("fabric, plain_gloo", [
    ("loopback", False), ("loopback", True), (Fabric(gbit=1.0, latency_us=500, kind="paced"), False),
    pytest.param(Fabric(gbit=1.0, latency_us=500, kind="shaped"), False, marks=needs_shaped)],
    ids=["loopback", "plain gloo", "paced", "shaped"])
def test_second_phases_keep_their_order_when_ranks_are_out_of_step(fabric, plain_gloo) -> None:
    first, second = run(out_of_step, plain_gloo, ranks=2, fabric=fabric, timeout_s=30)
    assert first == second


def two_groups():
    """Two models in one backward: one reduced by a pair of ranks, one by all."""
    rank = dist.get_rank()
    pair, out = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2], {}
    for name, state_of in {"onebit": OneBit, "powersgd": PowerSGD}.items():
        inside, whole = Given(), Given()
        models = [wrapped_with(state_of(inside, process_group=pair), inside, process_group=pair),
                  wrapped_with(state_of(whole), whole)]
        for update in range(5):
            grads = gradient(rank, update)
            sum(model(grads) for model in models).backward()
            for model in models:
                model.finish_gradient_synchronization()
            out[name] = [float(m.wide.grad.norm()) for m in (inside, whole)]
            for model in models:
                model.zero_grad()
    return out


def test_second_phases_of_two_groups_do_not_wait_for_each_other_in_a_circle() -> None:
    first, second, third, fourth = run(two_groups, ranks=4, fabric="loopback", timeout_s=30)
    for name in first:
        assert first[name] == second[name] and third[name] == fourth[name]
        assert first[name][0] != third[name][0] and first[name][1] == third[name][1]


def counted():
    out = {}
    for scheme, options in OPTIONS.items():
        model = Given()
        state = SCHEMES[scheme](model, **options)
        wrapped = wrapped_with(state, model)
        before = state.wire_bytes()
        train(wrapped, dist.get_rank(), range(3))
        out[scheme] = (state.wire_bytes() - before) / 3
    return out


@pytest.mark.parametrize("ranks", [1, 3])
def test_bytes_on_the_wire_are_the_closed_form(ranks) -> None:
    shapes = list(SHAPES.values())
    want = {"fp16": volumes.half(shapes, ranks), "bf16": volumes.half(shapes, ranks),
            "onebit": volumes.one_bit(shapes, ranks), "topk": volumes.top_k(shapes, ranks, OPTIONS["topk"]["k"]),
            "powersgd": volumes.power_sgd(shapes, ranks, OPTIONS["powersgd"]["rank"])}
    for got in run(counted, ranks=ranks, fabric="loopback"):
        assert got == pytest.approx(want)


def seen_by_the_kernel():
    from course_lib.launch.netns import kernel_bytes
    out, shapes = {}, {"weight": (1024, 512), "bias": (1000,)}
    for scheme in (None, *OPTIONS):
        model = Given(shapes)
        options = {"topk": {"k": 0.01}, "powersgd": {"rank": 16}}.get(scheme, {})
        hooked = {"comm_hook": hook, "hook_state": SCHEMES[scheme](model, **options)} if scheme else {}
        wrapped, grads = wrap("bucketed", model, **hooked), gradient(dist.get_rank(), 0, shapes)

        def sent(updates: int, wrapped=wrapped, grads=grads) -> int:
            before = kernel_bytes()[1]
            for _ in range(updates):
                wrapped(grads).backward()
                wrapped.finish_gradient_synchronization()
            dist.barrier()
            time.sleep(0.05)
            return kernel_bytes()[1] - before

        sent(2)
        out[scheme] = sent(8) / 8
    return out, list(shapes.values())


@needs_shaped
def test_bytes_that_the_kernel_sees() -> None:
    """On top of the closed form come headers, acknowledgements and the notes that ranks compare: 4 KB an update."""
    for got, shapes in run(seen_by_the_kernel, ranks=2, fabric=Fabric(gbit=1.0, kind="shaped")):
        want = {None: volumes.float32(shapes, 2), "fp16": volumes.half(shapes, 2), "bf16": volumes.half(shapes, 2),
                "onebit": volumes.one_bit(shapes, 2), "topk": volumes.top_k(shapes, 2, 0.01),
                "powersgd": volumes.power_sgd(shapes, 2, 16)}
        assert got == {scheme: pytest.approx(nbytes, rel=0.1, abs=5000) for scheme, nbytes in want.items()}
        assert got["fp16"] / got[None] == pytest.approx(1 / 2, rel=0.05)
        assert got["onebit"] / got[None] == pytest.approx(1 / 32, rel=0.1)
