"""What is saved of an optimizer and of random generators, in forms that any number of ranks can read."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim import Optimizer


def optimizer_state(params: Mapping[str, nn.Parameter], optimizer: Optimizer) -> dict[str, Any]:
    """By parameter name, in the form of `Sharded.full_optimizer_state`, so that each kind of run reads the other's."""
    state = {name: dict(optimizer.state[p]) for name, p in params.items() if p in optimizer.state}
    shaped = {key for name, values in state.items() for key, value in values.items()
              if torch.is_tensor(value) and value.shape == params[name].shape}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"state": state, "sharded": sorted(shaped), "groups": groups}


def load_optimizer_state(params: Mapping[str, nn.Parameter], optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """The state of every parameter that has some. The hyper-parameters stay those of `optimizer`."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    index = {id(p): i for i, p in enumerate(held)}
    state = {index[id(p)]: saved["state"][name] for name, p in params.items() if name in saved["state"]}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def seed_all(seed: int) -> None:
    """Begin all generators at `seed`, so that two runs with the same options are the same run."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Of Python, numpy, torch and this rank's GPU, made of tensors and plain values."""
    name, keys, *rest = numpy.random.get_state()
    version, numbers, left = random.getstate()
    return {"python": (version, torch.tensor(numbers), left),
            "numpy": (name, torch.from_numpy(keys.astype("int64")), *rest), "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None}


def load_random_state(saved: Mapping[str, Any]) -> None:
    version, numbers, left = saved["python"]
    random.setstate((version, tuple(numbers.tolist()), left))
    name, keys, *rest = saved["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
