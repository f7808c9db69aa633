"""What an event is: the one place that knows names and categories.

A device event is communication if its *name* says so, whatever stream it ran in. Categories
cover Kineto's of 2021 (`Kernel`, `Memcpy`) and of today (`kernel`, `gpu_memcpy`).
"""

from __future__ import annotations

import re
from functools import lru_cache

CATEGORIES = {
    "kernel": "kernel", "gpu_memcpy": "copy", "memcpy": "copy", "gpu_memset": "memset", "memset": "memset",
    "concurrent_kernel": "kernel", "gpu_kernel": "kernel",
    "cuda_runtime": "runtime", "cuda_driver": "runtime", "runtime": "runtime", "hip_runtime": "runtime",
    "privateuse1_runtime": "runtime", "privateuse1_driver": "runtime", "xpu_runtime": "runtime",
    "xpu_driver": "runtime", "mtia_runtime": "runtime",
    "cpu_op": "operator", "operator": "operator", "user_annotation": "annotation", "overhead": "overhead",
}
"""Category in lower case -> what we make of it. All others (`gpu_user_annotation`, `cuda_sync`, `python_function`,
`Trace`, flows, …) only describe or wait: they are never device work."""

DEVICE = ("kernel", "copy", "memset")

_COMM = re.compile(
    r"rccl|hccl|hcom_|oneccl|\bccl[_:]|msccl|nvshmem|rocshmem|\bmpi[:_]"
    r"|multimem_|cross_device_reduce|all_reduce_\w*shot|(?:one|two)_shot_all_reduce|quick_?reduce"
    r"|\b(?:deep_ep|hybrid_ep|ep|internode(?:_ll)?|intranode(?:_ll)?)::.*(?:dispatch|combine|notify)"
    r"|(?:internode|intranode)(?:_ll)?\w*(?:dispatch|combine|notify)|(?:dispatch|combine)_?(?:inter|intra)node"
    r"|(?<!sm)all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", re.IGNORECASE)
# torch.compile names a fused kernel after the operators it replaces, also after the collective that it consumes.
_FUSED = re.compile(r"^triton_", re.IGNORECASE)
_HOST_COMM = re.compile(r"^(?:gloo|mpi|ucc|oneccl|ccl):", re.IGNORECASE)
_DISPATCH = re.compile(r"^(?:nccl:|rccl:|hccl:|record_param_comms$|c10d::|_c10d_functional|symm_mem::)", re.IGNORECASE)
_STEP = re.compile(r"^(?:ProfilerStep[#*]\s*|course::step )(\d{1,18})(?!\d)")
_WIRE = re.compile(r"^wire::(\w+) bytes=(\d{1,18})(?: bucket=(\d{1,18}))?(?!\d)")
_TYPES = (
    ("all-reduce", r"all_?reduce|cross_device_reduce|multimem_\w*reduce|quick_?reduce"),
    ("all-gather", r"all_?gather"), ("reduce-scatter", r"reduce_?scatter"), ("all-to-all", r"all_?to_?all"),
    ("broadcast", r"broadcast"), ("send/recv", r"send_?recv|send|recv|p2p"), ("dispatch", r"dispatch"),
    ("combine", r"combine"), ("barrier", r"barrier"), ("notify", r"notify"), ("reduce", r"reduce"))


@lru_cache(maxsize=256)
def category(cat: str) -> str:
    """`kernel`, `copy`, `memset`, `runtime`, `operator`, `annotation`, `overhead`, or "" for what is never work."""
    return CATEGORIES.get(cat.lower(), "")


@lru_cache(maxsize=4096)
def is_communication(name: str) -> bool:
    """Whether a kernel of this name moves data between ranks."""
    # Apart from NCCL's name only the function itself counts: its template and call arguments may name anything.
    return "nccl" in name.lower() or (bool(_COMM.search(_bare(name))) and not _FUSED.match(name))


def device_kind(category: str, name: str) -> str:
    """The timeline's kind of a device event: `compute`, `comm`, `copy` or `memset`."""
    if category != "kernel":
        return category
    return "comm" if is_communication(name) else "compute"


@lru_cache(maxsize=4096)
def collective(name: str) -> str:
    """The type of a collective: `all-reduce`, …, or `unknown collective` (RCCL calls every kernel `Generic`)."""
    bare = _bare(name)
    return next((kind for kind, words in _TYPES if re.search(words, bare, re.IGNORECASE)), "unknown collective")


def host_communication(name: str) -> bool:
    """Whether a host span is the transfer itself (gloo's workers), not the launch of one."""
    return bool(_HOST_COMM.match(name))


def dispatches(name: str) -> bool:
    """Whether a host span only launches a collective: `nccl:all_reduce`, `c10d::allreduce_`, `record_param_comms`."""
    return bool(_DISPATCH.match(name))


def step_number(name: str) -> int | None:
    """The number of a step marker, None for anything else."""
    match = _STEP.match(name)
    return int(match.group(1)) if match else None


def wire_transfer(name: str) -> tuple[str, int, int] | None:
    """(operation, bytes, bucket or -1) of a transfer on the course's own Wire."""
    match = _WIRE.match(name)
    return (match.group(1), int(match.group(2)), int(match.group(3) or -1)) if match else None


def peer_copy(name: str) -> bool:
    """Whether a memcpy goes to another device."""
    return bool(re.search(r"PtoP|Peer|P2P", name))


def launches(name: str) -> bool:
    """Whether a runtime call of this name starts a kernel (CUDA, its driver, HIP, with and without Ex)."""
    return "LaunchKernel" in name or "LaunchCooperativeKernel" in name or name.startswith("hipExtModuleLaunch")


def launches_graph(name: str) -> bool:
    return "GraphLaunch" in name


@lru_cache(maxsize=4096)
def _bare(name: str) -> str:
    """A C++ kernel name without its template and call arguments, and without the return type's."""
    depth, kept = 0, []
    for char in name.replace("(anonymous namespace)", "anonymous"):
        if char in "<(":
            depth += 1
        elif char in ">)":
            depth = max(depth - 1, 0)
        elif not depth:
            kept.append(char)
    return "".join(kept) or name
