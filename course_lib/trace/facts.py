"""What a trace knows beyond spans, for the diagnosis: launches, backward, the profiler's own cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Launched(NamedTuple):
    """A device span and its launch on the host. Nanoseconds; `launch` is None where the launch was not recorded,
    `backward` says that an operator of the backward pass launched it."""

    name: str
    kind: str
    lane: str
    launch: int | None
    start: int
    stop: int
    step: int
    backward: bool


@dataclass(frozen=True)
class Facts:
    """One file. `device` is `cuda`, `rocm`, `xpu`, `cpu`, `emulated` or `unknown`: what the compute spans are of.

    `missing` counts, per step, launches whose kernel was never seen; `overhead` is the profiler's recorded cost in ns
    per step and `operators` the number of operators it recorded; `backward_end` is when a step's backward ended, ns.
    `described` and `collectives` count communication kernels that the profiler described, and all of them. `parted`:
    the host moved the bytes, and the run has groups of some of its ranks: whose collective it was is not recorded.
    """

    device: str = "unknown"
    launched: tuple[Launched, ...] = ()
    missing: dict[int, int] = field(default_factory=dict)
    overhead: dict[int, int] = field(default_factory=dict)
    operators: dict[int, int] = field(default_factory=dict)
    backward_end: dict[int, int] = field(default_factory=dict)
    collectives: int = 0
    described: int = 0
    parted: bool = False

    @property
    def on_device(self) -> bool:
        return self.device in ("cuda", "rocm", "xpu")
