"""CUDA devices and the links between them, asked through NVML, which starts nothing on a GPU.

No machine of ours has run this with a GPU: `NEVER_RUN` says which paths that is true of, and the report repeats it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import combinations
from types import ModuleType
from typing import Any

from course_lib.doctor.finding import Finding
from course_lib.doctor.versions import installed

NEVER_RUN = {
    "course_lib/launch/rank.py": "ranks joined by NCCL",
    "course_lib/launch/elastic.py": "torchrun with NCCL",
    "course_lib/launch/streams.py": "our Wire carrying CUDA tensors over gloo",
    "course_lib/train/sharded_wire.py": "ZeRO over NCCL",
    "course_lib/train/prefetch.py": "batches copied to the GPU beside its compute",
    "course_lib/train/profiled.py": "spans of CUDA kernels from the profiler",
    "course_lib/compress/stream.py": "compressed gradients over NCCL",
    "course_lib/schedule/mail.py": "pipelines over NCCL",
    "course_lib/tensor/vocabulary.py": "tensor parallelism over NCCL",
    "course_lib/doctor/devices.py": "this list of devices and links",
    "course_lib/doctor/fabrics.py": "the trial of the nccl fabric",
}
"""CUDA code that exists and has not been run on a GPU by those who wrote it."""

PATHS = {0: "on one board", 10: "one PCIe switch", 20: "several PCIe switches", 30: "one PCIe host bridge",
         40: "one NUMA node", 50: "across CPU sockets"}
"""NVML's nearest common ancestor of two devices, from the nearest to the farthest."""


def examine(facts: Mapping[str, Any], nvml: ModuleType | None = None) -> tuple[Finding, ...]:
    """`facts` is what a rank said of its torch (see `fabrics.probe`), empty where no rank could start."""
    found = tuple(_listed(nvml or _pynvml()))
    gpus = sum(finding.key.startswith("gpu") and "index" in finding.data for finding in found)
    return (*found, nccl(facts), never_run(gpus))


def _pynvml() -> ModuleType | None:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _listed(nvml: ModuleType | None) -> Iterator[Finding]:
    if nvml is None:
        yield _none("nvidia-ml-py is not installed, so nothing could be asked", "pip install nvidia-ml-py")
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        yield _none(f"no NVIDIA driver answers ({error})")
        return
    try:
        yield from _devices(nvml)
    except nvml.NVMLError as error:
        yield Finding("gpu", "warn", "GPU", "not readable", f"NVML answered: {error}")
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _none(why: str, remedy: str = "") -> Finding:
    return Finding("gpu", "note", "GPU", "none", f"{why}. Every lab works without: ranks compute on the CPU", remedy,
                   data={"count": 0})


def _devices(nvml: ModuleType) -> Iterator[Finding]:
    count = nvml.nvmlDeviceGetCount()
    if not count:
        yield _none("the NVIDIA driver shows no device")
        return
    cuda = nvml.nvmlSystemGetCudaDriverVersion()
    driver = f"driver {_text(nvml.nvmlSystemGetDriverVersion())}, CUDA {cuda // 1000}.{cuda % 1000 // 10}"
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    for index, handle in enumerate(handles):
        memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
        links = _active_links(nvml, handle)
        yield Finding(f"gpu{index}", "ok", f"GPU {index}", _text(nvml.nvmlDeviceGetName(handle)),
                      f"{memory / 2**30:.0f} GB, {links} NVLinks up; {driver}",
                      data={"index": index, "memory": memory, "nvlinks": links})
    for one, other in combinations(range(count), 2):
        path = _path(nvml, handles[one], handles[other])
        yield Finding(f"link{one}-{other}", "ok", f"GPU {one} – GPU {other}", path, data={"path": path})


def _active_links(nvml: ModuleType, handle: Any) -> int:
    """NVLinks of a device that are up; 0 where it has none."""
    up = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            up += nvml.nvmlDeviceGetNvLinkState(handle, link)
        except nvml.NVMLError:
            break
    return up


def _path(nvml: ModuleType, one: Any, other: Any) -> str:
    """NVLink where two devices reach each other by it, else how far apart they are on PCIe."""
    with suppress(nvml.NVMLError):
        if nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
            return "NVLink"
    try:
        ancestor = nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
    except nvml.NVMLError:
        return "not known"
    return PATHS.get(ancestor, f"level {ancestor}")


def nccl(facts: Mapping[str, Any]) -> Finding:
    """The NCCL that torch brings. Without one there is no nccl fabric, and no harm."""
    version = facts.get("nccl") or next(filter(None, map(installed, ("nvidia-nccl-cu13", "nvidia-nccl-cu12"))), "")
    if version:
        return Finding("nccl", "ok", "NCCL", version, f"torch for CUDA {facts.get('cuda') or 'of an unknown version'}",
                       data={"version": version})
    return Finding("nccl", "note", "NCCL", "none", "this torch is a build without CUDA; ranks talk through gloo",
                   data={"version": None})


def never_run(gpus: int) -> Finding:
    """Says plainly which code nobody has seen working."""
    what = "; ".join(NEVER_RUN.values())
    remedy = "make test-gpu runs it on yours" if gpus else ""
    return Finding("never_run", "note", "CUDA paths", "never run on a GPU", f"by us, so far: {what}", remedy,
                   data={"files": list(NEVER_RUN)})


def _text(value: str | bytes) -> str:
    """Older bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value
