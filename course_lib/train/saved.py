"""Does a saved state belong here: to this kind of thing, to this model, to this rank?

All that keeps something between updates saves with it *whose* it is: its `settings`, the `shapes` of its model and,
where it belongs to one rank, `size` and `rank`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from course_lib.train.base import Strategy

Kinds = dict[str, Any]
"""Shape and dtype by name."""


def whose(strategy: Strategy, any_rank: bool = False) -> dict[str, Any]:
    """What a state must have in common with `strategy` to be its own. With `any_rank` it is the same on all ranks."""
    control = strategy.control
    return {"settings": {"strategy": type(strategy).__name__, "op": strategy.op},
            "size": None if any_rank else control.size, "rank": None if any_rank else control.index,
            "shapes": kinds(strategy.module.state_dict(keep_vars=True))}


def refuse_other(name: str, state: Mapping[str, Any], mine: Mapping[str, Any], **kept: type) -> None:
    """Raises `ValueError` that says where `state` was saved with other settings, of another model, rank or number of
    ranks than those of `mine`, the same entries as they are here. `kept` are the entries it must have besides.
    A `size` and `rank` of None fit all."""
    known = isinstance(state, Mapping) and {*mine} <= state.keys() and isinstance(state["shapes"], Mapping)
    if known and state["settings"] != mine["settings"]:
        raise ValueError(f"the state was saved with {state['settings']}, and this is {mine['settings']}; load it into "
                         "what has the settings of the state")
    if not known or not all(isinstance(state.get(entry), kind) for entry, kind in kept.items()):
        raise ValueError(f"this is not the state of a {name}: pass what its state_dict() returned")
    if state["size"] not in (None, mine["size"]):
        raise ValueError(f"the state was saved on {state['size']} ranks and there are {mine['size']}, but it belongs "
                         f"to its rank. Resume on {state['size']} ranks, or start without a state")
    if state["rank"] not in (None, mine["rank"]):
        raise ValueError(f"the state is that of rank {state['rank']} and this is rank {mine['rank']}, but it belongs "
                         "to its rank. Save and load one state a rank")
    if state["shapes"] != mine["shapes"]:
        raise ValueError(f"the state belongs to another model ({_difference(state['shapes'], mine['shapes'])}); build "
                         "the model it was saved with, or start without a state")


def refuse_unlike(what: str, tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor],
                  whole: bool = True) -> None:
    """Raises `ValueError` that names one of `tensors`, which are `what` of a state, with another name, shape or dtype
    than `like` has; with `whole=False` some may be missing."""
    if not isinstance(tensors, Mapping):
        raise ValueError(f"the state is damaged: a {type(tensors).__name__} stands for {what}")
    saved, mine = kinds(tensors), kinds(like)
    if not whole:
        mine = {name: kind for name, kind in mine.items() if name in saved}
    if saved != mine:
        raise ValueError(f"the state is damaged or belongs to another model: of {what}, {_difference(saved, mine)}")


def kinds(tensors: Mapping[str, Any]) -> Kinds:
    return {name: (tuple(value.shape), str(value.dtype)) if torch.is_tensor(value) else type(value).__name__
            for name, value in tensors.items()}


def _difference(saved: Kinds, mine: Kinds) -> str:
    name = next(n for n in (*saved, *mine) if saved.get(n) != mine.get(n))
    return f"{name!r} is {saved.get(name, 'not there')} in the state and {mine.get(name, 'not there')} here"
