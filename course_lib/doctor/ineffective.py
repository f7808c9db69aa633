"""Variables that another one makes pointless, and that nobody complains about then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from course_lib.doctor.rules import as_number
from course_lib.doctor.variables import GUIDE, TORCH

Settings = Mapping[str, str]
_TRUE = ("1", "true", "t", "yes", "y")
_IB_ITSELF = ("NCCL_IB_DISABLE", "NCCL_IB_GDR_LEVEL", "NCCL_IB_CUDA_SUPPORT")


class Moot(NamedTuple):
    """`name` does nothing because of `other`: `when` both are as they are."""

    name: str
    other: str
    when: Callable[[Settings], bool]
    because: str
    source: str = GUIDE


def _number(name: str, *values: int | None) -> Callable[[Settings], bool]:
    """Whether a variable reads as one of these numbers; None stands for one that is not set."""
    return lambda s: (as_number(s[name]) if name in s else None) in values


def _true(settings: Settings, name: str) -> bool:
    return settings.get(name, "").lower() in _TRUE


def _prints(settings: Settings, *levels: str) -> bool:
    """Whether NCCL_DEBUG or NCCL_DEBUG_LEVELS asks for one of these levels."""
    asked = f"{settings.get('NCCL_DEBUG', '')},{settings.get('NCCL_DEBUG_LEVELS', '')}".upper().split(",")
    return any(level.strip() in levels for level in asked)


def _fixed_gid(settings: Settings) -> bool:
    index = as_number(settings.get("NCCL_IB_GID_INDEX", ""))
    return index is not None and index >= 0


_NO_GID = "it helps NCCL to choose a GID, and NCCL_IB_GID_INDEX has chosen one"
_NO_COPY = "GDRCopy is off unless NCCL_GDRCOPY_ENABLE=1"
_NO_WATCHDOG = "with blocking waits torch starts no watchdog, which alone looks at it"
TABLE = (
    Moot("NCCL_DEBUG_SUBSYS", "NCCL_DEBUG", lambda s: not _prints(s, "INFO", "TRACE", "ALL"),
         "it selects among the lines of NCCL_DEBUG=INFO, which are not asked for"),
    Moot("NCCL_DEBUG_FILE", "NCCL_DEBUG", lambda s: "NCCL_DEBUG" not in s and "NCCL_DEBUG_LEVELS" not in s,
         "nothing is written without NCCL_DEBUG"),
    Moot("NCCL_OOB_NET_IFNAME", "NCCL_OOB_NET_ENABLE", _number("NCCL_OOB_NET_ENABLE", None, 0),
         "it is looked at only with NCCL_OOB_NET_ENABLE=1"),
    Moot("NCCL_IB_PKEY", "NCCL_IB_PKEY_VALUE", lambda s: not _number("NCCL_IB_PKEY_VALUE", None, -1)(s),
         "the value wins over the index"),
    *(Moot(name, "NCCL_IB_GID_INDEX", _fixed_gid, _NO_GID)
      for name in ("NCCL_IB_ADDR_FAMILY", "NCCL_IB_ADDR_RANGE", "NCCL_IB_ROCE_VERSION_NUM")),
    Moot("NCCL_MAX_NRINGS", "NCCL_MAX_NCHANNELS", lambda s: "NCCL_MAX_NCHANNELS" in s, "the newer name wins"),
    Moot("NCCL_MIN_NRINGS", "NCCL_MIN_NCHANNELS", lambda s: "NCCL_MIN_NCHANNELS" in s, "the newer name wins"),
    Moot("NCCL_COLLNET_NODE_THRESHOLD", "NCCL_COLLNET_ENABLE", _number("NCCL_COLLNET_ENABLE", None, 0),
         "CollNet is off unless NCCL_COLLNET_ENABLE=1"),
    *(Moot(f"NCCL_GDRCOPY_{part}_ENABLE", "NCCL_GDRCOPY_ENABLE", _number("NCCL_GDRCOPY_ENABLE", None, 0), _NO_COPY)
      for part in ("FIFO", "SYNC", "FLUSH")),
    Moot("NCCL_P2P_PXN_LEVEL", "NCCL_PXN_DISABLE", _number("NCCL_PXN_DISABLE", 1), "PXN is off"),
    Moot("NCCL_NET_GDR_READ", "NCCL_NET_GDR_LEVEL", lambda s: s.get("NCCL_NET_GDR_LEVEL") in ("LOC", "0"),
         "GPUDirect RDMA is off, and with it its reads"),
    *(Moot(name, "NCCL_IB_MERGE_NICS", _number("NCCL_IB_MERGE_NICS", 0), "ports are not merged at all")
      for name in ("NCCL_NET_MERGE_POLICY", "NCCL_NET_MERGE_LEVEL")),
    Moot("NCCL_MNNVL_ENABLE", "NCCL_CUMEM_ENABLE",
         lambda s: _number("NCCL_CUMEM_ENABLE", 0)(s) and not _number("NCCL_MNNVL_ENABLE", 0)(s),
         "NVLink across nodes needs NCCL_CUMEM_ENABLE"),
    *(Moot(f"TORCH_NCCL_{name}", "TORCH_NCCL_BLOCKING_WAIT", lambda s: _true(s, "TORCH_NCCL_BLOCKING_WAIT"),
           _NO_WATCHDOG, "torch ProcessGroupNCCL.cpp") for name in ("ASYNC_ERROR_HANDLING", "DESYNC_DEBUG")),
    Moot("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_ENABLE_MONITORING",
         lambda s: "TORCH_NCCL_ENABLE_MONITORING" in s and not _true(s, "TORCH_NCCL_ENABLE_MONITORING"),
         "nobody listens to the heartbeat when monitoring is off", TORCH),
    *(Moot("TORCH_NCCL_DUMP_ON_TIMEOUT", size, lambda s, size=size: _true(s, "TORCH_NCCL_DUMP_ON_TIMEOUT") and
           _number(size, 0)(s), "a recorder of 0 entries has nothing to dump", TORCH)
      for size in ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")),
    Moot("TORCH_NCCL_NONBLOCKING_TIMEOUT", "TORCH_NCCL_USE_COMM_NONBLOCKING",
         lambda s: not _true(s, "TORCH_NCCL_USE_COMM_NONBLOCKING"), "it is the timeout of non-blocking communicators",
         "torch NCCLUtils.cpp"),
)


def moot(settings: Settings) -> Iterator[Moot]:
    """What is set and does nothing beside the other settings."""
    yield from (row for row in TABLE if row.name in settings and row.when(settings))
    if _number("NCCL_IB_DISABLE", 1)(settings):
        off, why = "NCCL_IB_DISABLE", "InfiniBand and RoCE are off"
    elif settings.get("NCCL_NET", "").lower() == "socket":
        off, why = "NCCL_NET", "NCCL_NET=Socket leaves InfiniBand and RoCE unused"
    else:
        return
    for name in sorted(settings):
        if name.startswith("NCCL_IB_") and name not in _IB_ITSELF:
            yield Moot(name, off, lambda s: True, why)
