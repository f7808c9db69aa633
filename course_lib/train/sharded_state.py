"""Whole state dicts of a sharded model and its optimizer: by parameter name, so that they fit any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from course_lib.train.sharded_gather import Gathers
from course_lib.train.sharded_unit import Unit


def full_state(module: nn.Module, units: Sequence[Unit]) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, tied ones under each of their names."""
    whole = {slot.param: value for unit in units for slot, value in zip(unit.slots, unit.assemble(unit.pieces))}
    return {name: whole[value] if value in whole else value.detach().clone()
            for name, value in module.state_dict(keep_vars=True).items()}


def load_full_state(module: nn.Module, units: Sequence[Unit], state: dict[str, torch.Tensor]) -> None:
    shapes = {slot.name: shape for unit in units for slot, shape in zip(unit.slots, unit.shapes)}
    here = module.state_dict(keep_vars=True)
    rest = {name: value for name, value in here.items()
            if not any(value is slot.param for unit in units for slot in unit.slots)}
    shapes |= {name: value.shape for name, value in rest.items()}
    state = state if isinstance(state, Mapping) else {}
    for name, shape in shapes.items():
        value = state.get(name)
        if not torch.is_tensor(value) or value.shape != shape:
            found = f"has {name!r} in shape {tuple(value.shape)}" if torch.is_tensor(value) else f"lacks {name!r}"
            raise ValueError(f"the state dict {found}, but the model has it in shape {tuple(shape)}; load what "
                             "full_state_dict() of the same model returned")
    if unknown := [name for name in state if name not in here]:
        raise ValueError(f"the state dict has {unknown[0]!r}, which the model lacks; load what full_state_dict() of "
                         "the same model returned")
    with torch.no_grad():
        for name, value in rest.items():
            value.copy_(state[name])
        for unit in units:
            for at, (slot, piece) in enumerate(zip(unit.slots, unit.pieces)):
                piece.copy_(unit.part(at, state[slot.name]))


def full_optimizer_state(units: Sequence[Unit], optimizer: Optimizer) -> dict[str, Any]:
    """`state[name][key]` is a whole tensor where the optimizer keeps one element for each of the parameter's, and what
    it keeps otherwise (a step count, say); `sharded` are the keys of the first kind, `groups` the hyper-parameters."""
    out: dict[str, dict[str, Any]] = {}
    sharded = sorted({key for unit in units for piece in unit.pieces
                      for key, value in optimizer.state.get(piece, {}).items() if _sharded(value)})
    for unit in units:
        states = [optimizer.state.get(piece, {}) for piece in unit.pieces]
        for slot, state in zip(unit.slots, states):
            if state:
                out[slot.name] = dict(state)
        for key in (key for key in sharded if any(key in state for state in states)):
            mine = [state.get(key, torch.zeros_like(piece)) for piece, state in zip(unit.pieces, states)]
            for slot, state, value in zip(unit.slots, states, unit.assemble(mine)):
                if key in state:
                    out[slot.name][key] = value
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"state": out, "sharded": sharded, "groups": groups}


def load_full_optimizer_state(units: Sequence[Unit], optimizer: Optimizer, full: dict[str, Any]) -> None:
    """Raises `ValueError`, with nothing changed, where the optimizer has other groups than the one whose state was
    saved, or the model other parameters."""
    if not isinstance(full, Mapping) or not {"state", "sharded", "groups"} <= full.keys():
        raise ValueError("this is not the state of a sharded model's optimizer: pass what full_optimizer_state() "
                         "returned")
    shapes = {slot.name: shape for unit in units for slot, shape in zip(unit.slots, unit.shapes)}
    for name, saved in full["state"].items():
        if name not in shapes or any(saved[key].shape != shapes[name] for key in full["sharded"] if key in saved):
            raise ValueError(f"the optimizer's state belongs to another model: {name!r} has another shape there, or is "
                             "not in this model")
    if len(full["groups"]) != len(optimizer.param_groups):
        raise ValueError(f"the state has {len(full['groups'])} parameter groups and this optimizer "
                         f"{len(optimizer.param_groups)}; make the same groups from model.shards()")
    index = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    state: dict[int, dict[str, Any]] = {}
    for unit in units:
        for at, (slot, piece) in enumerate(zip(unit.slots, unit.pieces)):
            saved = full["state"].get(slot.name, {})
            mine = {key: unit.part(at, value) if key in full["sharded"] else value
                    for key, value in saved.items()}
            if mine and id(piece) in index:
                state[index[id(piece)]] = mine
    groups = [{**saved, "params": group["params"]}
              for saved, group in zip(full["groups"], optimizer.state_dict()["param_groups"])]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _sharded(value: Any) -> bool:
    """Shards are 1-D, so what is 1-D has one value for each of their elements."""
    return torch.is_tensor(value) and value.dim() == 1


class WholeStates:
    """The part of `Sharded` that saves and loads: whole states, the same on all ranks whatever their number."""

    module: nn.Module
    units: list[Unit]
    gathers: Gathers

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        raise RuntimeError("the parameters are spread over the ranks: save full_state_dict(), called on every rank")

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("the parameters are spread over the ranks: use load_full_state_dict(), on every rank")

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The module's own state dict, with sharded parameters in float32 at least. Collective call; fits
        any number of ranks."""
        return full_state(self.module, self.units)

    def load_full_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take one over. Raises `ValueError` that names what is missing or has another shape."""
        load_full_state(self.module, self.units, state)
        self.gathers.invalidate()

    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State by parameter name and hyper-parameters by group. Collective call; fits any number of ranks."""
        return full_optimizer_state(self.units, optimizer)

    def load_full_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        load_full_optimizer_state(self.units, optimizer, state)
