"""Variables that only have a meaning together: with the strategy, or with each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from course_lib.doctor.ineffective import moot
from course_lib.doctor.rules import Whole
from course_lib.doctor.variables import GUIDE, Verdict

STRATEGIES = ("ddp", "fsdp2", "megatron-tp")
NAME = "CUDA_DEVICE_MAX_CONNECTIONS"
SOURCE = ("Megatron-LM layers.py; Megatron-FSDP user guide; pytorch/pytorch issue 143890; pytorch/torchtitan issue "
          "1147")
WHEN = "CUDA reads it once, when it starts: setting it from Python after the first CUDA call has no effect"

Line = tuple[str, str, Verdict, str, str, str]


def max_connections(settings: Mapping[str, str], strategy: str) -> Iterator[Line]:
    """One hardware queue keeps the order of launches, which Megatron's tensor parallelism counts on; several
    streams that should run at once (FSDP2, DDP's buckets) want many. CUDA's default is 8."""
    value = settings.get(NAME)
    if value is None:
        if strategy == "megatron-tp":
            yield (NAME, "not set", "depends", "Megatron's tensor-parallel overlap relies on the launch order that 1 "
                   f"keeps. {WHEN}", f"export {NAME}=1 before Python starts", SOURCE)
        return
    if wrong := Whole(1, 32).problem(value):
        yield NAME, value, "ignored", f"{wrong}; CUDA then uses its default", "correct or unset it", SOURCE
    elif int(value, 0) == 1 and strategy in ("ddp", "fsdp2"):
        yield (NAME, value, "harms_overlap", f"1 puts all streams into one queue, and {strategy} wants its "
               f"communication beside compute. {WHEN}", f"unset it for {strategy}", SOURCE)
    elif int(value, 0) == 1 and not strategy:
        yield (NAME, value, "depends", f"1 is right for Megatron's tensor-parallel overlap and wrong for FSDP2. {WHEN}",
               "unset it unless you train with Megatron TP; --strategy decides", SOURCE)
    elif int(value, 0) < 16 and strategy == "fsdp2":
        few = "fewer than CUDA's own 8" if int(value, 0) < 8 else "FSDP2 alone overlaps with CUDA's 8"
        yield (NAME, value, "depends", f"as many queues as streams are wanted: {few}; with tensor parallelism "
               f"beside it 16 or 32 are recommended. {WHEN}", f"export {NAME}=32 before Python "
               "starts", SOURCE)
    elif int(value, 0) > 1 and strategy == "megatron-tp":
        yield (NAME, value, "harms_overlap", "Megatron's tensor-parallel overlap relies on the launch order that only "
               f"1 keeps. {WHEN}", f"export {NAME}=1 before Python starts", SOURCE)
    else:
        yield NAME, value, "fine", f"as {strategy or 'most strategies'} wants it. {WHEN}", "", SOURCE


def contradictions(settings: Mapping[str, str]) -> Iterator[Line]:
    """Pairs of which one undoes the other."""
    if _whole(settings, NAME) == 1 and settings.get("TORCH_NCCL_ENABLE_TIMING", "").lower() in ("1", "true", "yes"):
        yield ("TORCH_NCCL_ENABLE_TIMING+" + NAME, "1 + 1", "harms_overlap", "together they undo all overlap of NCCL "
               "and compute", "unset TORCH_NCCL_ENABLE_TIMING", "pytorch/pytorch issue 143890")
    if settings.get("NCCL_P2P_DISABLE") == "1" and "NCCL_P2P_LEVEL" in settings:
        yield ("NCCL_P2P_DISABLE+NCCL_P2P_LEVEL", f"1 + {settings['NCCL_P2P_LEVEL']}", "contradiction",
               "the level is not looked at when P2P is disabled", "keep one of the two", "NCCL src/graph/paths.cc")
    threads, sockets = _whole(settings, "NCCL_SOCKET_NTHREADS"), _whole(settings, "NCCL_NSOCKS_PERTHREAD")
    if threads and sockets and threads * sockets > 64:
        yield ("NCCL_SOCKET_NTHREADS+NCCL_NSOCKS_PERTHREAD", f"{threads} × {sockets}", "contradiction",
               "their product cannot exceed 64", "make them smaller", GUIDE)
    for low, high in product(("NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS"), ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS")):
        least, most = _whole(settings, low), _whole(settings, high)
        if least and most and least > most:
            yield (f"{low}+{high}", f"{least} > {most}", "contradiction", "the least is above the most", "swap them",
                   GUIDE)
    if _whole(settings, "NCCL_MULTI_RANK_GPU_ENABLE") == 1 and _whole(settings, "NCCL_NVLS_ENABLE") == 1:
        yield ("NCCL_MULTI_RANK_GPU_ENABLE+NCCL_NVLS_ENABLE", "1 + 1", "refused", "NVLink SHARP does not work with "
               "several ranks on a GPU: communicators fail to start", "set NCCL_NVLS_ENABLE=0", GUIDE)
    if _whole(settings, "NCCL_GRAPH_STREAM_ORDERING") == 0 and _whole(settings, "NCCL_GRAPH_MIXING_SUPPORT") == 1:
        yield ("NCCL_GRAPH_STREAM_ORDERING+NCCL_GRAPH_MIXING_SUPPORT", "0 + 1", "contradiction", "graphs cannot be "
               "mixed without the order of streams", "set NCCL_GRAPH_MIXING_SUPPORT=0", GUIDE)
    algorithms = set(settings.get("NCCL_ALGO", "").lower().replace(" ", "").split(","))
    if _whole(settings, "NCCL_NVLS_ENABLE") == 0 and algorithms <= {"nvls", "nvlstree"}:
        yield ("NCCL_ALGO+NCCL_NVLS_ENABLE", f"{settings['NCCL_ALGO']} + 0", "refused", "the only algorithms that are "
               "allowed are off: since 2.24 NCCL fails then", "keep one of the two", GUIDE)
    for row in moot(settings):
        yield (f"{row.name}+{row.other}", f"{settings[row.name]} + {settings.get(row.other, 'not set')}",
               "contradiction", f"{row.name} has no effect: {row.because}", f"unset {row.name}, or set {row.other} to "
               "what it needs", row.source)


def _whole(settings: Mapping[str, str], name: str) -> int | None:
    try:
        return int(settings[name], 0)
    except (KeyError, ValueError):
        return None
