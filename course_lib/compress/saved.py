"""Does a saved state belong to this compressor on this rank?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def refuse_other(name: str, state: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raises `ValueError` that says where `state` was saved by another scheme, model, rank or number of ranks than that
    of `mine`, the same entries as they are here."""
    if not {*mine, "updates", "memories"} <= state.keys():
        raise ValueError(f"this is not the state of a {name}: pass what its state_dict() returned")
    if state["settings"] != mine["settings"]:
        raise ValueError(f"the state was saved with {state['settings']}, and this is {mine['settings']}; build {name} "
                         "with the settings of the state")
    if state["size"] != mine["size"]:
        raise ValueError(f"the state was saved on {state['size']} ranks and there are {mine['size']}: a residual "
                         f"belongs to its rank. Resume on {state['size']} ranks, or start without a state")
    if state["rank"] != mine["rank"]:
        raise ValueError(f"the state is that of rank {state['rank']} and this is rank {mine['rank']}: a residual "
                         "belongs to its rank. Save and load one state a rank")
    if state["shapes"] != mine["shapes"]:
        raise ValueError(f"the state belongs to another model ({_difference(state['shapes'], mine['shapes'])}); build "
                         "the model it was saved with, or start without a state")


def _difference(saved: Mapping[str, tuple], mine: Mapping[str, tuple]) -> str:
    name = next(n for n in (*saved, *mine) if saved.get(n) != mine.get(n))
    return f"{name!r} is {saved.get(name, 'not there')} in the state and {mine.get(name, 'not there')} here"
