"""The plain gloo group behind a Wire: on which network, with how many threads, with what limit."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from course_lib.launch.link import Pace


@dataclass(frozen=True)
class WireSpec:
    """What a rank needs to know about the fabric it is on."""

    kind: str
    provenance: str
    interface: str | None
    """The network interface of this rank. None: the loopback address where there is one machine, else the one that
    `GLOO_SOCKET_IFNAME` or the host's name gives."""
    node_of: tuple[int, ...]
    inner: Pace = field(default_factory=Pace)
    inter: Pace = field(default_factory=Pace)
    timeout_s: float = 60.0
    machines: int = 1


def _device(spec: WireSpec) -> Any:
    if interface := spec.interface or (spec.machines > 1 and os.environ.get("GLOO_SOCKET_IFNAME")):
        return dist.ProcessGroupGloo.create_device(interface=interface)
    if spec.machines > 1:
        return dist.ProcessGroupGloo.create_default_device()
    return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")


def gloo_group(store: dist.Store, rank: int, size: int, spec: WireSpec) -> dist.ProcessGroup:
    """A gloo group with one worker thread, so that what we start in order also runs in order."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [_device(spec)]
    options._threads = 1
    options._timeout = timedelta(seconds=spec.timeout_s)
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    for device_type in ("cpu", "cuda"):
        group._register_backend(torch.device(device_type), dist.ProcessGroup.BackendType.GLOO, backend)
    return group
