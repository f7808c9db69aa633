"""What the profiler knows about each collective: its type, group and bytes, from the kernel itself or its launch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from course_lib.trace.classify import collective, dispatches
from course_lib.trace.events import Event

_SIZES = {"byte": 1, "char": 1, "bool": 1, "int8": 1, "uint8": 1, "short": 2, "half": 2, "bfloat16": 2, "float16": 2,
          "int": 4, "float": 4, "float32": 4, "int32": 4, "long": 8, "double": 8, "int64": 8, "float64": 8}
# Longer names first: `reduce` begins many.
_SPELLINGS = {"allreduce": "all-reduce", "reducescatter": "reduce-scatter", "allgather": "all-gather",
              "alltoall": "all-to-all", "alltoallv": "all-to-all", "broadcast": "broadcast", "reduce": "reduce",
              "send": "send", "recv": "recv", "barrier": "barrier", "gather": "gather", "scatter": "scatter"}


def element_size(dtype: object) -> int | None:
    """Bytes of one element of a type as Kineto writes it (`Float`, `c10::BFloat16`), None if unknown."""
    return _SIZES.get(str(dtype).lower().removeprefix("c10::"))


class Collective(NamedTuple):
    """One collective as the ranks that take part call it. `name` is the same on all of them; `bytes` is the larger of
    what goes in and out on this rank, -1 where unknown; `known` says whether the profiler described it."""

    name: str
    bytes: int = -1
    known: bool = False


def describe(name: str, args: dict[str, Any]) -> Collective:
    """From the arguments that Kineto puts on NCCL kernels and on `record_param_comms`, else from the name alone."""
    told = args.get("Collective name")
    if not isinstance(told, str) or not told:
        bare = name.split("(")[0].split("<")[0].removeprefix("void ").strip()
        kind = collective(name)
        return Collective(bare if kind != "unknown collective" else f"unknown collective ({bare})")
    base = told.lower().replace("_", "")
    kind = next((words for key, words in _SPELLINGS.items() if base.startswith(key)), told)
    counts = [n for key in ("In msg nelems", "Out msg nelems") if isinstance(n := args.get(key), int) and n >= 0]
    size = element_size(args.get("dtype"))
    members = args.get("Process Group Ranks")
    group = args.get("Process Group Name", "")
    where = f" in group {group}" if group not in ("", None) else ""
    # The same group name may stand for another set of ranks elsewhere; the ranks tell them apart, if they are listed.
    if isinstance(members, str) and members not in ("", "[]") and "..." not in members:
        where += f" {members}"
    return Collective(kind + where, max(counts) * size if counts and size else -1, True)


def attribute(kernels: Sequence[Event], launched: dict[int, Event], calls: Sequence[Event]) -> list[Collective]:
    """Describe each communication kernel (in order of start): by its own arguments, by the id it shares with the
    launching `record_param_comms`, and, where the rest are as many as the calls left over, by order."""
    described = {c.external: c for c in calls if c.external is not None}
    found, used = [], set()
    for kernel in kernels:
        launch = launched.get(kernel.correlation) if kernel.correlation is not None else None
        ids = [i for i in (kernel.external, launch.external if launch else None) if i is not None]
        call = next((described[i] for i in ids if i in described), None)
        one = describe(kernel.name, kernel.args)
        if not one.known and call is not None:
            one = describe(kernel.name, call.args)
        if call is not None:
            used.add(id(call))
        found.append(one)
    rest = [i for i, c in enumerate(found) if not c.known]
    left = sorted((c for c in calls if id(c) not in used and c.args.get("Collective name") not in ("wait", "init")),
                  key=lambda c: c.start)
    if rest and len(rest) == len(left):
        for i, call in zip(rest, left):
            found[i] = describe(kernels[i].name, call.args)
    return found


class Under:
    """Whether a launch happened inside a collective's host call: its copies then are communication."""

    def __init__(self, spans: Iterable[Event]) -> None:
        self.calls = sorted((e.start, e.stop) for e in spans if dispatches(e.name))
        self.reach: list[int] = []
        for _, stop in self.calls:
            self.reach.append(max(stop, self.reach[-1] if self.reach else stop))

    def __call__(self, time: int) -> bool:
        k = bisect_right(self.calls, (time, 2**63))
        return bool(k) and time < self.reach[k - 1]
