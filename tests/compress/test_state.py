"""What is kept between updates: resumed, refused, and left alone by an update that was skipped."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist

from course_lib.compress import SCHEMES, NonFiniteGradient, OneBit, PowerSGD, TopK, hook
from course_lib.launch import RankFailed, run
from course_lib.train import wrap
from tests.compress.given import OPTIONS, SHAPES, Given, gradient, train, wrapped_with
from tests.train.on_ranks import backward, grads, same
from tests.train.trainer import Bomb, Mined, error_of, odd_one

STATES = {"onebit": OneBit, "topk": lambda m, **o: TopK(m, k=0.1, momentum=0.5, warm_up=3, **o),
          "powersgd": lambda m, **o: PowerSGD(m, rank=2, **o)}


def equal(a, b) -> bool:
    """Two states, down to the bits."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return a == b


def resumed():
    rank, out = dist.get_rank(), {}
    for name, state_of in STATES.items():
        whole = Given()
        straight = train(wrapped_with(state_of(whole), whole), rank, range(6))
        first = Given()
        state = state_of(first)
        before = train(wrapped_with(state, first), rank, range(3))
        file = io.BytesIO()
        torch.save(state.state_dict(), file)
        file.seek(0)
        second = Given()
        fresh = state_of(second)
        fresh.load_state_dict(torch.load(file, weights_only=True))
        # another layout: one bucket, and DDP
        after = train(wrap("ddp", second, comm_hook=hook, hook_state=fresh), rank, range(3, 6))
        out[name] = [equal(a, b) for a, b in zip(straight, before + after)], state.state_dict()
    return out


def test_resumed_is_uninterrupted_to_the_bit_and_residuals_differ_between_ranks() -> None:
    first, second = run(resumed, ranks=2, fabric="loopback")
    for name in STATES:
        assert all(first[name][0]) and all(second[name][0]), (name, first[name][0])
        mine, other = (r[name][1]["memories"]["residual"] for r in (first, second))
        assert not torch.equal(mine["wide"], other["wide"]), name


def refusals():
    model, out = Given(), {}
    state = TopK(model, k=0.1)
    train(wrapped_with(state, model), dist.get_rank(), range(2))
    saved = copy.deepcopy(state.state_dict())
    small = TopK(Given({"a": (7, 6)}), k=0.1).state_dict()
    for name, other in {"rank": {**saved, "rank": 1 - dist.get_rank()}, "size": {**saved, "size": 4},
                        "model": small, "scheme": OneBit(model).state_dict(),
                        "k": TopK(model, k=0.2).state_dict(),
                        "garbage": {"residual": 0}}.items():
        try:
            state.load_state_dict(other)
        except ValueError as error:
            out[name] = str(error)
    return out, equal(saved, state.state_dict())


def test_the_state_of_another_model_rank_or_run_is_refused_and_changes_nothing() -> None:
    for got, unchanged in run(refusals, ranks=2, fabric="loopback"):
        assert unchanged
        for name, words in {"rank": "one state a rank", "size": "saved on 4 ranks and there are 2",
                            "model": "'scalar' is not there in the state", "scheme": "'onebit'",
                            "k": "'k': 0.2", "garbage": "not the state of a TopK"}.items():
            assert words in got[name], (name, got[name])


def not_finite(kind: str):
    """Rank 1 has a NaN in one parameter in update 2."""
    rank, out = dist.get_rank(), {}

    def spoil(grads, update):
        if update == 2 and rank == 1:
            grads["wide"][3, 5] = float("inf")
        return grads

    for name, state_of in STATES.items():
        model = Given()
        state = state_of(model, on_nonfinite="nan")
        wrapped = wrapped_with(state, model, kind)
        train(wrapped, rank, range(2))
        before = copy.deepcopy(state.state_dict())
        (grads,) = train(wrapped, rank, range(2, 3), spoil)
        unchanged = equal(before, state.state_dict())
        after = train(wrapped, rank, range(3, 5))
        never = Given()
        without = wrapped_with(state_of(never), never, kind)
        train(without, rank, range(2))
        expected = train(without, rank, range(3, 5))
        out[name] = unchanged, bool(grads["wide"].isnan().all()), all(equal(a, b) for a, b in zip(after, expected))
    return out


@pytest.mark.parametrize("kind", ["bucketed", "ddp"])
def test_a_skipped_update_leaves_every_residual_as_if_it_had_not_been(kind) -> None:
    for got in run(not_finite, kind, ranks=2, fabric="loopback"):
        assert got == dict.fromkeys(STATES, (True, True, True))


def raising(kind: str):
    rank, out = dist.get_rank(), {}

    def spoil(grads, update):
        if rank == 1:
            grads["wide"][3, 5] = float("nan")
        return grads

    for name, state_of in STATES.items():
        model = Given()
        state = state_of(model)
        wrapped = wrapped_with(state, model, kind)
        train(wrapped, rank, range(2))
        before = copy.deepcopy(state.state_dict())
        try:
            train(wrapped, rank, range(2, 3), spoil)
        except RuntimeError as error:
            out[name] = str(error), equal(before, state.state_dict())
        if kind == "bucketed":
            train(wrapped, rank, range(3, 4))
            assert state.updates == 3
    return out


@pytest.mark.parametrize("kind", ["bucketed", "ddp"])
def test_a_gradient_that_is_not_finite_is_an_error_on_every_rank(kind) -> None:
    for got in run(raising, kind, ranks=2, fabric="loopback"):
        assert set(got) == set(STATES)
        for name, (message, unchanged) in got.items():
            assert "not finite" in message and NonFiniteGradient.__name__ in message, message
            assert "rank 1" in message or name == "powersgd"
            assert unchanged, name


class Sometimes(Given):
    """Without the parameters in `out`."""

    out = ()

    def forward(self, grads):
        return sum((p * grads[n]).sum() for n, p in self.named_parameters() if n not in self.out)


def used_now_and_then(kind: str):
    """Two parameters are used by both ranks, by rank 0 alone, and by none, in turn. What was given of them, was
    delivered, and is kept, on this rank."""
    rank, kept, out = dist.get_rank(), ("wide", "bias"), {}
    for name, state_of in STATES.items():
        model = Sometimes()
        state = TopK(model, k=0.1) if name == "topk" else state_of(model)
        wrapped = wrapped_with(state, model, kind, find_unused=True)
        given, delivered = ({n: torch.zeros(SHAPES[n]) for n in kept} for _ in range(2))
        for update in range(6):
            model.out = kept if update % 3 == 2 or (update % 3 == 1 and rank) else ()
            grads = gradient(rank, update)
            wrapped.zero_grad()
            wrapped(grads).backward()
            wrapped.finish_gradient_synchronization()
            for n in kept:
                given[n] += 0 if n in model.out else grads[n]
                delivered[n] += 0 if getattr(model, n).grad is None else getattr(model, n).grad
            assert (model.wide.grad is None) == (update % 3 == 2)
        memories = state.state_dict()["memories"]
        out[name] = given, delivered, memories["residual"], memories.get("second residual", {})
        if name == "powersgd":
            assert memories["q"]["wide"].any()
    return out


@pytest.mark.parametrize("kind", ["bucketed", "ddp"])
def test_what_is_owed_to_a_parameter_that_is_not_used_is_not_lost(kind) -> None:
    first, second = run(used_now_and_then, kind, ranks=2, fabric="loopback")
    for name in STATES:
        for n in ("wide", "bias"):
            given, delivered = (sum(r[name][i][n] for r in (first, second)) / 2 for i in (0, 1))
            left = sum(r[name][2][n] for r in (first, second)) / 2
            if name == "onebit":
                left = left + torch.cat([r[name][3][n] for r in (first, second)])
            torch.testing.assert_close(delivered + left.view(given.shape), given, rtol=1e-4, atol=1e-3,
                                       msg=lambda m, where=f"{name}, {n}": f"{where}: {m}")


def scaled(growth: int):
    """Six updates with a loss scale that doubles after `growth` of them and is halved by an overflow before update 3;
    and the same without a scale. What arrived, in the scale of the gradient, and what is owed."""
    rank, out = dist.get_rank(), {}
    for name, state_of in STATES.items():
        ends = []
        for scaler in (torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=growth), None):
            model = Given()
            state = state_of(model, on_nonfinite="nan")
            wrapped = wrapped_with(state, model)
            optimizer, arrived = torch.optim.SGD(model.parameters(), lr=1.0), []
            if scaler:
                state.follow(scaler)
            for update in (0, 1, 2, "overflow", 3, 4, 5):
                if update == "overflow" and not scaler:
                    continue
                grads = gradient(rank, 0 if update == "overflow" else update)
                if update == "overflow" and rank:
                    grads["wide"][0, 0] = float("inf")
                wrapped.zero_grad()
                loss = wrapped(grads)
                (scaler.scale(loss) if scaler else loss).backward()
                wrapped.finish_gradient_synchronization()
                if scaler:
                    scaler.unscale_(optimizer)
                if update != "overflow":
                    arrived.append({n: p.grad.clone() for n, p in model.named_parameters()})
                if scaler:
                    scaler.step(optimizer)
                    scaler.update()
            kept = state.state_dict()
            owed = {key: {n: x / kept["scale"] for n, x in values.items()} for key, values in kept["memories"].items()
                    if key != "q"}
            ends.append({"owed": owed, **dict(enumerate(arrived))})
        out[name] = equal(*ends), kept["updates"]
    return out


@pytest.mark.parametrize("growth", [2, 100])
def test_what_is_owed_follows_the_scale_of_the_loss(growth) -> None:
    for got in run(scaled, growth, ranks=2, fabric="loopback"):
        assert got == dict.fromkeys(STATES, (True, 6))


def followed_without_nan():
    with pytest.raises(ValueError, match='on_nonfinite="nan"'):
        TopK(Given(), k=0.1).follow(torch.amp.GradScaler("cpu"))


def test_a_scaler_is_followed_only_where_it_sees_overflows() -> None:
    run(followed_without_nan, ranks=1, fabric="loopback")


def damaged():
    out = {}
    for name, state_of in STATES.items():
        model = Given()
        state = state_of(model)
        train(wrapped_with(state, model), dist.get_rank(), range(2))
        before = state.state_dict()
        for what, spoil in {"shape": lambda kept: kept.update(wide=kept["wide"][1:]),
                            "name": lambda kept: kept.update(other=kept["wide"]),
                            "NaN": lambda kept: kept["wide"].fill_(float("nan"))}.items():
            wrong = copy.deepcopy(before)
            spoil(wrong["memories"][list(wrong["memories"])[-1]])
            with pytest.raises(ValueError, match="damaged"):
                state.load_state_dict(wrong)
            out[name, what] = equal(state.state_dict(), before)
        with pytest.raises(ValueError, match="damaged"):
            state.load_state_dict({**before, "memories": {}})
        with pytest.raises(ValueError, match="not the state of a"):
            state.load_state_dict({key: value for key, value in before.items() if key != "scale"})
    return out


def test_a_damaged_state_is_refused_and_nothing_is_changed() -> None:
    for got in run(damaged, ranks=2, fabric="loopback"):
        assert len(got) == 9 and all(got.values())


def elsewhere():
    """PowerSGD in buckets of one and of many parameters, so that every matrix lies at another place."""
    for rank in (1, 2):
        found = []
        for mb in (1e-6, 10):
            model = Given()
            wrapped = wrap("bucketed", model, bucket_mb=mb, first_bucket_mb=None, comm_hook=hook,
                           hook_state=PowerSGD(model, rank=rank))
            found.append(dict(enumerate(train(wrapped, dist.get_rank(), range(4)))))
        assert equal(*found), rank


def test_where_a_matrix_lies_changes_no_bit() -> None:
    run(elsewhere, ranks=2, fabric="loopback")


def dropped():
    """Rank 1's backward raises in window 2, when some of its buckets are on the wire; and a run without that window."""
    out = {}
    for name, state_of in STATES.items():
        ends = []
        for windows in (range(5), (0, 1, 3, 4)):
            torch.manual_seed(0)
            model = Mined()
            state = state_of(model)
            wrapped, said = wrapped_with(state, model), []
            for i in windows:
                wrapped.zero_grad()
                Bomb.armed = i == 2 and odd_one()
                said.append(error_of(lambda i=i, wrapped=wrapped: window(wrapped, i)))
                Bomb.armed = False
            ends.append((grads(wrapped), state.state_dict()))
        out[name] = list(map(bool, said)), same(ends[0][0], ends[1][0]), equal(ends[0][1], ends[1][1])
    return out


def window(wrapped, i: int) -> None:
    backward(wrapped, i)
    wrapped.finish_gradient_synchronization()


@pytest.mark.filterwarnings("ignore")
def test_a_window_that_is_dropped_leaves_nothing_to_be_sent_later() -> None:
    for got in run(dropped, ranks=2, fabric="loopback"):
        assert got == dict.fromkeys(STATES, ([False] * 4, True, True))


def different_settings():
    TopK(Given(), k=0.1 if dist.get_rank() else 0.2)


def another_module():
    model = Given()
    train(wrapped_with(OneBit(Given()), model), dist.get_rank(), range(1))


@pytest.mark.parametrize("job, words", [(different_settings, "rank 1 built TopK with other settings"),
                                        (another_module, "from the module you wrap")])
def test_mistakes_are_named(job, words) -> None:
    with pytest.raises(RankFailed, match=words):
        run(job, ranks=2, fabric="loopback", timeout_s=30)


def empty_bucket_at_the_end():
    model = Given()
    state = TopK(model, k=0.1)
    plan = [[n for n in SHAPES if n != "empty"], ["empty"]]
    train(wrap("bucketed", model, plan=plan, comm_hook=hook, hook_state=state), dist.get_rank(), range(2))
    return state.updates


def test_a_last_bucket_that_is_never_sent_does_not_hold_the_residual_up() -> None:
    assert run(empty_bucket_at_the_end, ranks=2, fabric="loopback") == [2, 2]


def shared_halves():
    """fp16 and bf16 have nothing to keep, and say so in the same way."""
    model = Given()
    return [SCHEMES[s](model, **OPTIONS[s]).state_dict()["memories"] for s in ("fp16", "bf16")]


def test_half_precision_keeps_nothing() -> None:
    assert run(shared_halves, ranks=1, fabric="loopback") == [[{}, {}]]
