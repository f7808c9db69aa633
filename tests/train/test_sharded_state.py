"""A sharded run is saved whole, and goes on with another number of ranks or in another stage."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from course_lib.launch import run
from course_lib.train import Sharded, accumulate, data
from course_lib.train.gpt import squared_loss
from course_lib.train.reference import reference
from tests.train.cases import Branches, Odd, state

MODELS = {"odd sizes": Odd, "unused": Branches}
BATCHES, WINDOWS = 6, 4


def model_of(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def adamw(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, eps=1e-4, weight_decay=0.1)


def batches(window: int) -> list:
    """Those of all ranks together."""
    return list(data.synthetic(4, 6, BATCHES, seed=window))


def go_on(name: str, stage: int, windows: range, saved: dict | None = None) -> dict:
    """Train through `windows`, from what was saved; the whole state at the end, and what the module holds."""
    torch.set_num_threads(1)
    model = Sharded(model_of(name), stage=stage, find_unused=True)
    optimizer = adamw(model.shards())
    if saved:
        model.load_full_state_dict(saved["model"])
        model.load_full_optimizer_state(optimizer, saved["optimizer"])
    for window in windows:
        mine = batches(window)[dist.get_rank()::dist.get_world_size()]
        accumulate(model, mine, squared_loss, "micro", every=True)
        optimizer.step()
        optimizer.zero_grad()
    with model.gathered():
        here = state(model.module)
    return {"model": model.full_state_dict(), "optimizer": model.full_optimizer_state(optimizer), "here": here}


def both(stage: int, windows: range) -> dict[str, dict]:
    return {name: go_on(name, stage, windows) for name in MODELS}


def resumed(saved: dict[str, dict], stage: int) -> dict[str, dict]:
    return {name: go_on(name, stage, range(2, WINDOWS), saved[name]) for name in MODELS}


@pytest.fixture(scope="module")
def saved() -> dict[str, dict]:
    results = run(both, 3, range(2), ranks=2, fabric="loopback")
    for name in MODELS:
        for key, value in results[0][name]["model"].items():
            assert torch.equal(value, results[1][name]["model"][key])
    return results[0]


@pytest.mark.parametrize("ranks, stage", [(1, 1), pytest.param(3, 2, marks=pytest.mark.slow),
                                          pytest.param(3, 3, marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_uninterrupted_one(ranks: int, stage: int, saved: dict[str, dict]) -> None:
    results = run(resumed, saved, stage, ranks=ranks, fabric="loopback")
    for name in MODELS:
        want = reference(lambda name=name: model_of(name), [[batches(w)] for w in range(WINDOWS)], squared_loss, adamw,
                         "micro")
        for key, value in want.items():
            for rank in results:
                torch.testing.assert_close(rank[name]["here"][key], value, rtol=1e-4, atol=1e-5)


def test_the_whole_state_is_that_of_one_process(saved: dict[str, dict]) -> None:
    for name in MODELS:
        model, states = model_of(name), saved[name]["optimizer"]["state"]
        assert set(saved[name]["model"]) == set(model.state_dict())
        used = {n for n, _ in model.named_parameters() if not n.startswith("never")}
        assert set(states) == used, "a parameter that no rank used has no state"
        for key, value in saved[name]["model"].items():
            assert value.shape == model.state_dict()[key].shape
            if key in states:
                assert states[key]["exp_avg"].shape == value.shape and float(states[key]["step"]) == 2


def test_what_does_not_fit_is_named(saved: dict[str, dict]) -> None:
    found = run(misfits, saved["odd sizes"], ranks=1, fabric="loopback")[0]
    assert "lacks 'first.bias'" in found[0] and "'first.bias' in shape (9,)" in found[1]
    assert "has 1 parameter groups and this optimizer 2" in found[2]


def misfits(saved: dict) -> list[str]:
    model = Sharded(model_of("odd sizes"), stage=2)
    shards = model.shards()
    two = torch.optim.SGD([{"params": shards[:1]}, {"params": shards[1:]}], lr=0.1)
    without = {name: value for name, value in saved["model"].items() if name != "first.bias"}
    out = []
    for action in (lambda: model.load_full_state_dict(without),
                   lambda: model.load_full_state_dict({**without, "first.bias": torch.zeros(9)}),
                   lambda: model.load_full_optimizer_state(two, saved["optimizer"])):
        with pytest.raises(ValueError) as error:
            action()
        out.append(str(error.value))
    return out
