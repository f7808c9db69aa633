"""Events of small traces, as Kineto writes them. Times in microseconds."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "ampere_sgemm_128x64_tn"


def event(cat: str, name: str, ts: float, dur: float, tid: Any = 1, **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": 100, "tid": tid, "ts": ts, "dur": dur, "args": args}


def step(number: int, ts: float, dur: float) -> Event:
    return event("user_annotation", f"ProfilerStep#{number}", ts, dur)


def launch(correlation: int, ts: float, name: str = "cudaLaunchKernel", **args: Any) -> Event:
    return event("cuda_runtime", name, ts, 2, correlation=correlation, **args)


def kernel(name: str, ts: float, dur: float, correlation: int, stream: int = 7, **args: Any) -> Event:
    return event("kernel", name, ts, dur, stream, device=0, stream=stream, correlation=correlation, **args)


def launched(name: str, ts: float, dur: float, correlation: int, stream: int = 7, at: float | None = None,
             **args: Any) -> list[Event]:
    """A kernel and its launch, 10 us before or at `at`."""
    return [launch(correlation, ts - 10 if at is None else at), kernel(name, ts, dur, correlation, stream, **args)]


def one_step(offset: float = 0) -> list[Event]:
    """A step of 1000 us: compute 100–500, all-reduce 300–700, so 200 of 400 us hidden."""
    return [step(1, offset, 1000), *launched(GEMM, offset + 100, 400, 1),
            *launched(ALL_REDUCE, offset + 300, 400, 2, stream=20)]
