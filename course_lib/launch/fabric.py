"""Which wires join the ranks, and how fast they are. No torch here: a fabric is checked before anything starts."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace

KINDS = ("auto", "shaped", "paced", "loopback", "nccl")
PRESETS = {  # Gbit/s, latency of one collective between two ranks in microseconds
    "1GbE": (1.0, 100.0),
    "10GbE": (10.0, 60.0),
    "25GbE": (25.0, 40.0),
    "100GbE": (100.0, 20.0),
    "IB-HDR": (200.0, 8.0),
    "NVLink": (2400.0, 6.0),
}
PRESET_GBIT = 1.0
"""The rate that the fastest preset of a fabric is carried at here. Presets keep ratios, not speeds."""


@dataclass(frozen=True)
class Fabric:
    """The wires of a run.

    `Fabric("10GbE")` takes a preset by the name people use: it is carried at a rate this machine can
    really deliver, `scale` says by how much rates (and the bytes a lab sends) are divided, and the
    provenance of every picture repeats it. `Fabric(gbit=1.0, latency_us=4000)` asks for absolute
    figures: Gbit/s a rank and direction, and the latency that one collective pays before it starts.

    With `nodes` above 1, `inter` (a preset) or `inter_gbit` is the uplink of each node. `kind` is
    `shaped` (the kernel sets the rate), `paced` (the Wire does), `loopback` (plain gloo), `nccl`, or
    `auto`: for a fabric with a rate or a latency, shaped where it works, else paced; for one without, nccl with
    enough GPUs, else loopback.
    """

    preset: str | None = None
    gbit: float | None = None
    latency_us: float | None = None
    nodes: int = 1
    ranks_per_node: int | None = None
    inter: str | None = None
    inter_gbit: float | None = None
    inter_latency_us: float | None = None
    kind: str = "auto"

    def __post_init__(self) -> None:
        if self.preset in KINDS:  # Fabric("paced") reads well and means the kind
            object.__setattr__(self, "kind", self.preset)
            object.__setattr__(self, "preset", None)
        if self.kind not in KINDS:
            raise ValueError(f"unknown fabric kind {self.kind!r}: choose one of {', '.join(KINDS)}")
        for name in (self.preset, self.inter):
            if name is not None and name not in PRESETS:
                raise ValueError(f"unknown fabric preset {name!r}: choose one of {', '.join(PRESETS)}, "
                                 "or give gbit= and latency_us=")
        for name in ("gbit", "inter_gbit"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}={value} is not a rate: give Gbit/s above 0")
        for name in ("latency_us", "inter_latency_us"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value} is not a latency: give microseconds, 0 or more")
        if self.nodes < 1 or (self.ranks_per_node is not None and self.ranks_per_node < 1):
            raise ValueError("a fabric needs at least one node and one rank on each")
        if self.preset and self.gbit:
            raise ValueError("give a preset or gbit=, not both")
        if (self.preset and self.inter_gbit) or (self.gbit and self.inter):
            raise ValueError("presets are scaled and absolute rates are not: give both links as presets, or both in "
                             "Gbit/s")
        if self.inter and self.inter_gbit:
            raise ValueError("give inter= or inter_gbit=, not both")
        if self.nodes == 1 and (self.inter or self.inter_gbit or self.inter_latency_us):
            raise ValueError("a link between nodes needs nodes=2 or more")

    @property
    def scale(self) -> float:
        """How many times slower this fabric is carried than its presets are in life; 1 for absolute rates."""
        fastest = max((PRESETS[p][0] for p in (self.preset, self.inter) if p), default=0.0)
        return max(1.0, fastest / PRESET_GBIT)

    def rate_gbit(self) -> float | None:
        """Gbit/s of a rank's own link, as carried here; None if nothing limits it."""
        return PRESETS[self.preset][0] / self.scale if self.preset else self.gbit

    def inter_rate_gbit(self) -> float | None:
        """Gbit/s of a node's uplink, as carried here; the rank's own rate if it was not given."""
        if self.inter:
            return PRESETS[self.inter][0] / self.scale
        return self.inter_gbit if self.inter_gbit else self.rate_gbit()

    def latency_s(self) -> float:
        """Seconds that one collective waits before it starts."""
        if self.latency_us is not None:
            return self.latency_us * 1e-6
        return PRESETS[self.preset][1] * 1e-6 if self.preset else 0.0

    def inter_latency_s(self) -> float:
        if self.inter_latency_us is not None:
            return self.inter_latency_us * 1e-6
        return PRESETS[self.inter][1] * 1e-6 if self.inter else self.latency_s()

    def placed(self, ranks: int) -> Fabric:
        """This fabric with the ranks spread over its nodes. Raises `ValueError` if they do not fit."""
        per_node = self.ranks_per_node or -(-ranks // self.nodes)
        if self.nodes * per_node != ranks:
            raise ValueError(f"{ranks} ranks do not fill {self.nodes} nodes with {per_node} ranks each: "
                             "choose ranks = nodes × ranks_per_node")
        return replace(self, ranks_per_node=per_node)

    def resolved(self, ranks: int) -> Fabric:
        """The fabric that will really be used: placed, `auto` decided, every refusal made here."""
        placed = self.placed(ranks)
        kind = placed.kind
        if kind == "auto":
            limited = placed.rate_gbit() is not None or placed.latency_s() > 0
            kind = (("shaped" if shaped_works() else "paced") if limited else
                    "nccl" if gpus() >= ranks else "loopback")
        if kind == "nccl" and (placed.rate_gbit() is not None or placed.latency_s() > 0):
            raise ValueError("on nccl the hardware sets rate and latency, and this fabric asks for its own: leave them "
                             'out, or use kind="auto" (the labs need the wires that they name)')
        if kind == "nccl" and gpus() < ranks:
            raise ValueError(f"{ranks} NCCL ranks need {ranks} GPUs and this machine shows {gpus()}: two NCCL ranks "
                             'never share a GPU. Use fabric="shaped" or "paced" (gloo carries CUDA tensors too)')
        if kind == "shaped" and not shaped_works():
            raise ValueError("this machine cannot shape its wires (ip and tc must work in a user namespace): "
                             'use fabric="paced", where the Wire itself keeps the rate')
        if kind in ("shaped", "paced") and placed.rate_gbit() is None:
            placed = replace(placed, gbit=1.0)
        return replace(placed, kind=kind)

    def provenance_note(self) -> str:
        """What to add to a picture's provenance: the kind, the rate and the scale."""
        if self.kind in ("nccl", "loopback"):
            return self.kind  # nothing limits these wires, whatever was asked for
        parts = [self.kind]
        if self.preset or self.gbit:
            parts.append(self.preset or f"{self.gbit:g} Gbit/s")
        if self.nodes > 1:
            parts.append(f"{self.nodes} nodes, {self.inter or f'{self.inter_rate_gbit():g} Gbit/s'} between")
        if self.latency_s() >= 1e-3:
            parts.append(f"{self.latency_s() * 1e3:g} ms a collective")
        if self.scale > 1:
            parts.append(f"scaled 1/{self.scale:g}")
        return ", ".join(parts)


def as_fabric(value: str | Fabric) -> Fabric:
    """A `Fabric` from a kind, a preset's name, or itself."""
    if isinstance(value, Fabric):
        return value
    if isinstance(value, str):
        if value not in KINDS and value not in PRESETS:
            raise ValueError(f"unknown fabric {value!r}: choose a kind ({', '.join(KINDS)}) "
                             f"or a preset ({', '.join(PRESETS)})")
        return Fabric(value)
    raise ValueError(f"fabric must be a name or a Fabric, not {type(value).__name__}")


@functools.lru_cache
def gpus() -> int:
    """CUDA devices that a process here can see, asked without initialising any."""
    if shutil.which("nvidia-smi") is None:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([d for d in visible.split(",") if d.strip() and d.strip() != "-1"])
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


@functools.lru_cache
def shaped_works() -> bool:
    """Whether this user can make namespaces, veth pairs and token buckets here. It tries them: the
    exit code of `unshare` alone proves nothing."""
    if sys.platform != "linux":
        return False
    trial = "from course_lib.launch.netns import trial; trial()"
    done = subprocess.run([sys.executable, "-c", trial], capture_output=True, timeout=30, stdin=subprocess.DEVNULL,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    return done.returncode == 0
