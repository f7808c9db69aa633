"""Which modules of a model are gathered as one, and which parameters belong to none of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch.distributed as dist
from torch import nn

from course_lib.train.hooks import Slot
from course_lib.train.sharded_gather import Station
from course_lib.train.sharded_unit import Unit

_LISTS = (nn.ModuleList, nn.ModuleDict)
"""They hold modules and are never called themselves."""


def layers(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Names of the modules in the outermost lists and sequences, in the order of registration: a model's layers."""
    listed = isinstance(module, (*_LISTS, nn.Sequential))
    for name, child in module.named_children():
        if listed and not isinstance(child, _LISTS):
            yield prefix + name
        else:
            yield from layers(child, f"{prefix}{name}.")


def checked(module: nn.Module, names: Sequence[str]) -> list[str]:
    """`names` in the order of registration. Raises `ValueError` on one that is unknown or lies inside another."""
    known = {name: part for name, part in module.named_modules() if name}
    for name in names:
        if name not in known:
            raise ValueError(f"unit {name!r} is no module of {type(module).__name__}; its modules are "
                             f"{', '.join(list(known)[:6])}{', …' if len(known) > 6 else ''}")
        if isinstance(known[name], _LISTS):
            raise ValueError(f"unit {name!r} is a {type(known[name]).__name__}, which is never called; name its "
                             "members")
        if outer := [other for other in names if name.startswith(f"{other}.")]:
            raise ValueError(f"unit {name!r} lies inside unit {outer[0]!r}; name one of the two")
    return [name for name in known if name in names]


def stations(module: nn.Module, names: Sequence[str], slots: Sequence[Slot], group: dist.ProcessGroup,
             gathering: dist.ProcessGroup, release: bool) -> list[Station]:
    """The root first. A parameter that two modules share, or that no named module has, is the root's; units of one
    station differ in dtype or device."""
    modules = [("", module), *((name, module.get_submodule(name)) for name in names)]
    homes: dict[int, list[int]] = {}
    for index, (_, part) in enumerate(modules[1:], 1):
        for param in part.parameters():
            homes.setdefault(id(param), []).append(index)
    members: list[list[Slot]] = [[] for _ in modules]
    for slot in slots:
        home = homes.get(id(slot.param), [])
        members[home[0] if len(home) == 1 else 0].append(slot)
    out: list[Station] = []
    units = 0
    for (name, part), mine in zip(modules, members):
        if out and not mine:
            continue
        kinds = [list(same) for _, same in groupby(sorted(mine, key=_kind), _kind)]
        out.append(Station(len(out), name, part, [Unit(units + i, kind, group, gathering, release)
                                                  for i, kind in enumerate(kinds)]))
        units += len(kinds)
    return out


def _kind(slot: Slot) -> str:
    return f"{slot.param.dtype} on {slot.param.device}"
