"""A state that was saved elsewhere is refused in one sentence, and changes nothing: every kind of wrapper with the
state of every other, of other models, of other ranks, and with what is no state at all."""

from __future__ import annotations

import copy
import io

import torch
import torch.distributed as dist
from torch import nn

from course_lib.train import Delayed, DiLoCo, LocalSGD, Sharded, wrap
from tests.train.on_ranks import together
from tests.train.trainer import parameters

PLAIN = {"serial": {}, "no_sync": {}, "bucketed": {}, "every_step": {}, "step_per_bucket": {}}
KEEPING = {"local_sgd": {"every": 4}, "diloco": {"every": 2}, "delayed": {"delay": 2}}
KINDS = {**PLAIN, **KEEPING, "zero1": {}, "zero3": {}}


class Given(nn.Module):
    """Parameters of these shapes, in this order."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for name, shape in (shapes or {"a": (3, 2), "b": (5,), "c": (5,)}).items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((x.mean() * i * p).square().sum() for i, p in enumerate(self.parameters(), 1))


class Run:
    """A wrapper that has made three updates: under `KINDS` a round, one window of the next, two gradients under way."""

    def __init__(self, kind: str, module: nn.Module | None = None, updates: int = 3, **options) -> None:
        self.model = wrap(kind, module or Given(), **{**KINDS[kind], **options})
        sharded = isinstance(self.model, Sharded)
        self.optimizer = torch.optim.SGD(self.model.shards() if sharded else self.model.parameters(), 0.001, 0.9)
        if hasattr(self.model, "take_optimizer"):
            self.model.take_optimizer(self.optimizer)
        for i in range(updates):
            self.update(i)

    def update(self, i: int) -> None:
        self.model(torch.full((2,), 1.0 + i + dist.get_rank())).backward()
        self.model.finish_gradient_synchronization()
        if not getattr(self.model, "steps_itself", False):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict:
        return copy.deepcopy(self.model.full_state_dict() if isinstance(self.model, Sharded)
                             else self.model.state_dict())

    def load(self, state) -> None:
        if isinstance(self.model, Sharded):
            self.model.load_full_state_dict(state)
        else:
            self.model.load_state_dict(state)

    def refusal(self, load, *state) -> str:
        """What `load(*state)` raises, where it leaves all as it was."""
        before = self.state()
        try:
            load(*state)
        except (ValueError, RuntimeError) as error:
            return str(error) if equal(before, self.state()) else f"changed, {error}"
        return "loaded"


def equal(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def again(state):
    """Through a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


on_ranks, got = together()


@on_ranks
def every_pair():
    states = {kind: again(Run(kind).state()) for kind in KINDS}
    out = {}
    for kind in KINDS:
        for other, state in states.items():
            one = Run(kind, updates=1)
            out[other, kind] = one.refusal(one.load, state)
    return out


def test_every_kind_takes_its_own_state_and_refuses_those_of_others(got) -> None:
    families = [{kind} for kind in KEEPING] + [{*PLAIN}, {"zero1", "zero3"}]
    for rank in got(every_pair):
        for (other, kind), said in rank.items():
            if any({other, kind} <= family for family in families):
                assert said == "loaded", (other, kind, said)
            elif {other, kind} <= {*KEEPING}:
                assert f"saved with {{'strategy': '{NAMES[other]}'" in said, said
                assert f"this is {{'strategy': '{NAMES[kind]}'" in said, said
            elif kind in KEEPING or (other in KEEPING and kind in PLAIN):
                assert said.startswith("this is not the state of a"), (other, kind, said)
            else:  # names with and without "module."
                assert "lacks 'a'" in said or 'Missing key(s) in state_dict: "module.a"' in said, (other, kind, said)


NAMES = {"local_sgd": "LocalSGD", "diloco": "DiLoCo", "delayed": "Delayed"}

MODELS = {"smaller": {"a": (3, 2), "b": (5,)}, "another shape": {"a": (3, 2), "b": (5,), "c": (7,)},
          "larger": {"a": (3, 2), "b": (5,), "c": (5,), "d": (1,)},
          "float64": {"a": (3, 2), "b": (5,), "c": (5,), "dtype": torch.float64}}
SAID = {"smaller": "'c' is not there in the state", "another shape": "'c' is ((7,), 'torch.float32') in the state",
        "larger": "'d' is ((1,), 'torch.float32') in the state and not there here",
        "float64": "'a' is ((3, 2), 'torch.float64') in the state"}


@on_ranks
def other_models():
    out = {}
    for kind in KEEPING:
        for name, shapes in MODELS.items():
            for updates in (0, 3):
                state, one = Run(kind, Given(**shapes), updates).state(), Run(kind)
                out[kind, name, updates] = one.refusal(one.load, state)
                out[kind, name, "alone"] = one.refusal(one.model.set_extra_state, state["_extra_state"])
    return out


def test_the_state_of_another_model_is_refused(got) -> None:
    for rank in got(other_models):
        for (kind, name, updates), said in rank.items():
            assert "another model" in said and SAID[name] in said and "changed" not in said, (kind, name, updates, said)


@on_ranks
def other_frozen_parts():
    """The model is the same, and 'c' was frozen there. Nothing is kept of it, but some is wanted."""
    out = []
    for there, here in ((True, False), (False, True)):
        for kind in ("diloco", "delayed"):
            modules = Given(), Given()
            for module, frozen in zip(modules, (there, here)):
                module.c.requires_grad_(not frozen)
            one = Run(kind, modules[1])
            out.append((kind, there, one.refusal(one.load, Run(kind, modules[0]).state())))
    return out


def test_what_is_kept_must_be_of_the_trainable_parameters(got) -> None:
    for rank in got(other_frozen_parts):
        for kind, frozen_there, said in rank:
            if kind == "delayed" and frozen_there:
                assert said == "loaded"  # a parameter without a gradient is one that was not used
            else:
                assert "'c' is" in said and "not there" in said and "changed" not in said, (kind, frozen_there, said)


@on_ranks
def other_ranks():
    """Inside a round and at its end, under way and flushed: with the state of the other rank, and of three ranks."""
    out = {}
    for kind in KEEPING:
        for updates in (3, 4):
            mine = Run(kind, updates=updates).state()
            box = [None, None]
            dist.all_gather_object(box, mine)
            three = copy.deepcopy(mine)
            if three["_extra_state"]["size"] is not None:
                three["_extra_state"]["size"] = 3
            for name, state in (("rank", box[1 - dist.get_rank()]), ("size", three), ("mine", mine)):
                one = Run(kind)
                out[kind, updates, name] = one.refusal(one.load, state)
    return out


def test_the_state_of_another_rank_is_refused_where_it_belongs_to_it(got) -> None:
    for at, rank in enumerate(got(other_ranks)):
        for (kind, updates, name), said in rank.items():
            if kind == "delayed" or updates == 4 or name == "mine":
                assert said == "loaded", (kind, updates, name, said)
            elif name == "rank":
                assert f"that of rank {1 - at} and this is rank {at}" in said, said
            else:
                assert "saved on 3 ranks and there are 2" in said, said


@on_ranks
def rubbish():
    out = {}
    for kind in KINDS:
        one = Run(kind)
        for name, state in {"None": None, "a list": [], "empty": {}}.items():
            out[kind, name] = one.refusal(one.load, state)
    for kind in KEEPING:
        one = Run(kind)
        good = one.state()["_extra_state"]
        out |= {(kind, name): one.refusal(one.model.set_extra_state, state)
                for name, state in {"its None": None, "its list": [], "its empty": {}}.items()}
        for key in good:
            out |= {(kind, f"no {key}"): one.refusal(one.model.set_extra_state, {k: good[k] for k in good if k != key})}
            if key not in ("size", "rank"):
                out |= {(kind, f"{key} is None"): one.refusal(one.model.set_extra_state, {**good, key: None})}
    return out


def test_what_is_no_state_is_refused(got) -> None:
    for rank in got(rubbish):
        for what, said in rank.items():
            words = "not the state of a", "lacks 'a'", "saved with None", "Missing key(s)"
            assert any(some in said for some in words), (what, said)


@on_ranks
def damaged():
    out = {}
    diloco, delayed = Run("diloco"), Run("delayed")
    for name, tensor in (("shape", torch.zeros(6)), ("dtype", torch.zeros(5, dtype=torch.float64)), ("none", None)):
        good = diloco.state()["_extra_state"]
        good["old"]["b"] = tensor
        out["old", name] = diloco.refusal(diloco.model.set_extra_state, good)
        good = diloco.state()["_extra_state"]
        good["outer"]["state"]["b"]["momentum_buffer"] = tensor
        out["momentum", name] = diloco.refusal(diloco.model.set_extra_state, good)
        good = delayed.state()["_extra_state"]
        good["gradients"][1]["b"] = tensor
        out["gradient", name] = delayed.refusal(delayed.model.set_extra_state, good)
    good = delayed.state()["_extra_state"]
    out["gradient", "list"] = delayed.refusal(delayed.model.set_extra_state, {**good, "gradients": [[]]})
    for kind in KEEPING:
        for name, change in (("lacks", {}), ("shape", {"module.b": torch.zeros(6)})):
            one = Run(kind)
            good = {key: value for key, value in one.state().items() if key != "module.b"}
            out[kind, name] = one.refusal(one.load, good | change)
    good = diloco.state()["_extra_state"]
    del good["outer"]["param_groups"]
    out["outer", "groups"] = diloco.refusal(diloco.model.set_extra_state, good)
    return out


def test_a_damaged_state_is_refused(got) -> None:
    for rank in got(damaged):
        for what, said in rank.items():
            assert said.startswith("the state is damaged"), (what, said)
            assert "'b' is" in said or what[1] in ("list", "groups"), (what, said)


@on_ranks
def other_sums():
    state, one = Run("delayed", op="sum").state(), Run("delayed")
    few = Run("delayed", delay=1)
    return one.refusal(one.load, state), few.refusal(few.load, one.state())


def test_a_sum_is_no_mean_and_every_gradient_needs_its_window(got) -> None:
    for summed, few in got(other_sums):
        assert "'op': 'sum'" in summed and "'op': 'mean'" in summed and "changed" not in summed
        assert few.startswith("the checkpoint has 2 gradients under way, but delay=1")


@on_ranks
def in_another_order():
    """'b' and 'c' have one shape, and are registered the other way round: the outer momentum is each one's own."""
    first, second = Run("diloco"), Run("diloco", Given(seed=1, a=(3, 2), c=(5,), b=(5,)), updates=0)
    second.load(again(first.state()))
    kept = [{s.name: run.model.outer.state[old]["momentum_buffer"] for s, old in zip(run.model.slots, run.model._old)}
            for run in (first, second)]
    return equal(*kept), torch.equal(kept[0]["b"], kept[0]["c"])


def test_the_outer_momentum_is_found_by_name(got) -> None:
    assert got(in_another_order) == [(True, False)] * 2


@on_ranks
def a_state_that_was_loaded_stays_what_it_was():
    state = Run("diloco").state()
    kept, one = copy.deepcopy(state), Run("diloco")
    one.load(state)
    for i in range(4):
        one.update(i)
    return equal(kept, state)


def test_training_does_not_write_into_a_state(got) -> None:
    assert got(a_state_that_was_loaded_stays_what_it_was) == [True, True]


@on_ranks
def the_parameters_alone():
    """`strict=False` begins local updates where another strategy has ended."""
    state, one = Run("bucketed").state(), Run("local_sgd", updates=0)
    one.model.load_state_dict(state, strict=False)
    return torch.equal(parameters(one.model), torch.cat([p.flatten() for p in state.values()])), one.model.local_steps


def test_the_parameters_alone_can_be_asked_for(got) -> None:
    assert got(the_parameters_alone) == [(True, 0)] * 2


@on_ranks
def sharded():
    one = Run("zero3", find_unused=True)
    whole = one.model.full_optimizer_state(one.optimizer)
    larger = Run("zero3", Given(**MODELS["larger"]), find_unused=True)
    other = Run("zero3", Given(**MODELS["another shape"]), find_unused=True)

    def load(state) -> None:
        one.model.load_full_optimizer_state(one.optimizer, state)

    said = [one.refusal(load, state) for state in (None, [], {}, one.optimizer.state_dict())]
    said += [one.refusal(load, o.model.full_optimizer_state(o.optimizer)) for o in (larger, other)]
    said.append(one.refusal(one.load, larger.state()))
    return said, equal(whole, one.model.full_optimizer_state(one.optimizer))


def test_the_whole_state_of_another_model_is_refused(got) -> None:
    for (*rubbish_, larger, other, parameters_), unchanged in got(sharded):
        assert unchanged and all("pass what full_optimizer_state() returned" in said for said in rubbish_)
        assert "another model: 'd'" in larger and "another model: 'c'" in other
        assert "has 'd', which the model lacks" in parameters_


def test_the_kinds_here_are_all_that_keep_something() -> None:
    from course_lib.train import STRATEGIES
    keeping = {name for name, kind in STRATEGIES.items() if type(kind) is type and "get_extra_state" in dir(kind)
               and kind.get_extra_state is not nn.Module.get_extra_state}
    assert keeping == {*KEEPING} and {LocalSGD, DiLoCo, Delayed} == {STRATEGIES[name] for name in keeping}
