"""What a model runs on: GPUs, the links inside a node and between nodes, and how much of each is really got.

Peaks are the makers' data sheets (dense bf16, no sparsity). Efficiencies are calibrated against published runs
(`calibrate.py`), the same for every run on that type of GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from course_lib.plan.volumes import Impossible


class Efficiency(NamedTuple):
    """Shares of the peak that long runs get. `matmul`: of FLOP/s, on top of the memory traffic of the operands;
    `memory`: of memory bandwidth; `attention`: fused attention's share of FLOP/s, with all s² scores counted though
    a causal kernel computes half; `link`: of the links' bandwidth, inside and between nodes."""

    matmul: float
    memory: float
    attention: float
    link: float


@dataclass(frozen=True)
class GPU:
    """One device. FLOP/s in bf16; bytes; bytes a second; `nvlink` and `network` in each direction for each GPU."""

    name: str
    flops: float
    memory: float
    bandwidth: float
    nvlink: float
    network: float
    efficiency: Efficiency
    calibrated: bool = True
    """False: no published run of this type is among those the efficiencies were fitted to."""


A100 = Efficiency(matmul=0.823, memory=0.675, attention=0.631, link=0.727)
H100 = Efficiency(matmul=0.752, memory=0.507, attention=0.360, link=0.737)

GIB = 2**30
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("a100-40", 312e12, 40 * GIB, 1555e9, 300e9, 25e9, A100),
        GPU("a100-80", 312e12, 80 * GIB, 2039e9, 300e9, 25e9, A100),
        GPU("h100", 989e12, 80 * GIB, 3350e9, 450e9, 50e9, H100),
        GPU("h100-96", 989e12, 96 * GIB, 2400e9, 450e9, 50e9, H100),
        GPU("h200", 989e12, 141e9, 4800e9, 450e9, 50e9, H100, calibrated=False),
        GPU("b200", 2250e12, 180e9, 7700e9, 900e9, 50e9, H100, calibrated=False),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """`gpus` GPUs in nodes of `node`. Latencies are seconds of one hop of a ring: inside a node, and between two."""

    gpu: GPU
    gpus: int
    node: int = 8
    hop_s: float = 1e-6
    network_hop_s: float = 10e-6

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.node < 1:
            raise Impossible(f"{self.gpus} GPUs in nodes of {self.node}: both are 1 at least")
        if self.gpus > self.node and self.gpus % self.node:
            raise Impossible(f"{self.gpus} GPUs do not fill nodes of {self.node}: {self.gpus % self.node} are left "
                             "over. Choose a multiple, or another --node")

    def with_efficiency(self, efficiency: Efficiency) -> Cluster:
        return replace(self, gpu=replace(self.gpu, efficiency=efficiency))

    def collective_s(self, sent: float, ranks: int, inside: int, passes: int = 1) -> float:
        """Seconds of a ring over `ranks` ranks of which `inside` share a node, each sending `sent` bytes, in
        `passes` rounds of ranks−1 hops (2 for an all-reduce, 1 for a gather or a scatter).

        Between nodes, every GPU has a network card of its own, and NCCL runs as many rings as the group has GPUs in a
        node: together they carry `inside` cards' bandwidth, at most NVLink's.
        """
        if ranks == 1:
            return 0.0
        gpu, nodes = self.gpu, -(-ranks // inside)
        bandwidth = gpu.nvlink if nodes == 1 else min(gpu.nvlink, inside * gpu.network)
        hops = (ranks - nodes) * self.hop_s + (nodes if nodes > 1 else 0) * self.network_hop_s
        return sent / (bandwidth * gpu.efficiency.link) + passes * hops

    def send_s(self, sent: float, between_nodes: bool) -> float:
        """Seconds of one message from a GPU to another."""
        bandwidth = self.gpu.network if between_nodes else self.gpu.nvlink
        return sent / (bandwidth * self.gpu.efficiency.link) + (self.network_hop_s if between_nodes else self.hop_s)


def cluster(gpu: str, gpus: int, node: int = 8, *, nvlink_gb: float | None = None,
            network_gb: float | None = None) -> Cluster:
    """A preset GPU in nodes of `node`. `nvlink_gb`, `network_gb`: GB/s (10⁹ bytes) a GPU and direction, if other than
    the preset's. Raises `Impossible` for an unknown GPU, a rate of 0 or less, or nodes that are not filled."""
    if gpu.lower() not in GPUS:
        raise Impossible(f"there is no GPU {gpu!r}: choose one of {', '.join(GPUS)}")
    found = GPUS[gpu.lower()]
    for name, rate in (("nvlink", nvlink_gb), ("network", network_gb)):
        if rate is not None:
            if not rate > 0:
                raise Impossible(f"a {name} of {rate} GB/s carries nothing: give a rate above 0")
            found = replace(found, **{name: rate * 1e9})
    return Cluster(found, gpus, node)
