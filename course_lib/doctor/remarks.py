"""What is to be said of single variables: switches for debugging, names that went away, settings that undo overlap.

`when` lists the values that the remark is about; without it, every value except those in `except_for`.
"""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.doctor.variables import GUIDE, TORCH, Verdict


@dataclass(frozen=True)
class Remark:
    """One sentence about a variable, with its source and what to do."""

    verdict: Verdict
    sentence: str
    source: str
    remedy: str = "unset it outside a debugging session"
    when: tuple[str, ...] = ()
    except_for: tuple[str, ...] = ("0",)

    def applies(self, value: str) -> bool:
        value = value.strip().lower()
        return value in self.when if self.when else value not in self.except_for


_ON = ("1", "true", "t", "yes", "y")
_SAME_ISSUE = "pytorch/pytorch issue 143890"

REMARKS: dict[str, Remark] = {
    "NCCL_P2P_DISABLE": Remark(
        "debug_only", "no direct GPU-to-GPU copies: NVLink and PCIe peer access lie idle, data takes the host's memory",
        GUIDE, when=("1",)),
    "NCCL_P2P_LEVEL": Remark(
        "debug_only", "LOC is NCCL_P2P_DISABLE=1 by another name", GUIDE, when=("loc", "0")),
    "NCCL_SHM_DISABLE": Remark(
        "debug_only", "GPUs of a node without peer access talk over the network instead of shared memory", GUIDE),
    "NCCL_IB_DISABLE": Remark(
        "debug_only", "no InfiniBand or RoCE: NCCL falls back to IP sockets, which are slower", GUIDE),
    "NCCL_NVB_DISABLE": Remark("debug_only", "no NVLink path through an intermediate GPU", GUIDE),
    "NCCL_PXN_DISABLE": Remark("debug_only", "no way to a network card that belongs to another GPU of the node", GUIDE),
    "NCCL_CHECK_POINTERS": Remark("debug_only", "every call checks its pointers, which costs latency", GUIDE),
    "NCCL_LAUNCH_MODE": Remark(
        "harms_overlap", "one thread launches for all GPUs of the process, which serialises launches; deprecated since "
        "2.9 and PARALLEL is the default", f"{GUIDE}; NVIDIA/nccl issues 297, 613", "unset it", when=("group",)),
    "NCCL_ALGO": Remark(
        "tuning", "NCCL chooses among these algorithms alone, whatever the size of a message: trees suit small ones, "
        "rings large ones", f"{GUIDE} (NCCL_ALGO, NCCL_TREE_THRESHOLD)",
        "leave the choice to NCCL, or exclude one algorithm with ^", except_for=()),
    "NCCL_BUFFSIZE": Remark(
        "tuning", "the buffer between two GPUs, 4 MiB by default; it is no bucket size", GUIDE,
        "leave it, unless memory is short", except_for=()),
    "NCCL_NTHREADS": Remark(
        "tuning", "threads in the CUDA block of each channel: fewer leave more of the GPU to compute", GUIDE,
        "leave the choice to NCCL", except_for=()),
    "NCCL_NET_GDR_LEVEL": Remark(
        "debug_only", "GPUDirect RDMA is never used: what a network card sends takes the host's memory", GUIDE,
        when=("loc", "0")),
    "NCCL_SOCKET_IFNAME": Remark(
        "fine", "interfaces for IP sockets, by prefix (= exact, ^ all but these); InfiniBand and RoCE cards are chosen "
        "by NCCL_IB_HCA", GUIDE, "", except_for=()),
    "NCCL_IB_HCA": Remark(
        "fine", "InfiniBand and RoCE cards, by prefix: mlx5_1 means mlx5_10 as well, =mlx5_1 does not", GUIDE, "",
        except_for=()),
    "NCCL_IB_TIMEOUT": Remark(
        "debug_only", "0, like everything above 31, is no timeout at all: a lost link hangs instead of failing", GUIDE,
        "set it to 31 at most", when=("0", *map(str, range(32, 256)))),
    "NCCL_CROSS_NIC": Remark(
        "fine", "whether a ring may leave a node by another card than it came in: 0 for networks of rails, 1 where all "
        "cards share a switch, 2 (default) where it is faster; no effect with one card", GUIDE, "", except_for=()),
    "NCCL_PROTO": Remark(
        "tuning", "a fixed protocol loses at other message sizes; LL128 on hardware that lacks it corrupts data", GUIDE,
        "leave the choice to NCCL, or exclude one protocol with ^", except_for=()),
    "NCCL_MAX_NCHANNELS": Remark(
        "deprecated", "fewer channels leave more SMs to compute and give less bandwidth; superseded in 2.17", GUIDE,
        "use NCCL_MAX_CTAS", except_for=()),
    "NCCL_MIN_NCHANNELS": Remark(
        "deprecated", "superseded in 2.17", GUIDE, "use NCCL_MIN_CTAS", except_for=()),
    "NCCL_MAX_NRINGS": Remark(
        "deprecated", "an alias of NCCL_MAX_NCHANNELS since 2.5", GUIDE, "use NCCL_MAX_CTAS", except_for=()),
    "NCCL_MIN_NRINGS": Remark(
        "deprecated", "an alias of NCCL_MIN_NCHANNELS since 2.5", GUIDE, "use NCCL_MIN_CTAS", except_for=()),
    "NCCL_CHECKS_DISABLE": Remark("removed", "deprecated since 2.2.12", GUIDE, "unset it", except_for=()),
    "NCCL_IB_CUDA_SUPPORT": Remark("removed", "removed in 2.4", GUIDE, "use NCCL_NET_GDR_LEVEL", except_for=()),
    "NCCL_IB_GDR_LEVEL": Remark("removed", "renamed in 2.4", GUIDE, "use NCCL_NET_GDR_LEVEL", except_for=()),
    "NCCL_SINGLE_RING_THRESHOLD": Remark("removed", "removed in 2.3", GUIDE, "unset it", except_for=()),
    "NCCL_LL_THRESHOLD": Remark("removed", "removed in 2.5", GUIDE, "use NCCL_PROTO for experiments", except_for=()),
    "NCCL_TREE_THRESHOLD": Remark("removed", "removed in 2.5", GUIDE, "use NCCL_ALGO for experiments", except_for=()),
    "NCCL_MULTI_RANK_GPU_ENABLE": Remark(
        "tuning", "two ranks on one GPU are experimental and can hang; this course never starts them", GUIDE),
    "NCCL_PSK": Remark("fine", "a key for encryption; its value is not shown", GUIDE, "", except_for=()),
    "TORCH_NCCL_BLOCKING_WAIT": Remark(
        "harms_overlap", "wait() blocks the host until the collective is over, so that nothing is queued behind it",
        f"{TORCH}; pytorch/pytorch issue 45943", "unset it", when=_ON),
    "TORCH_NCCL_ENABLE_TIMING": Remark(
        "harms_overlap", "a timed event before each collective: with CUDA_DEVICE_MAX_CONNECTIONS=1 it undoes all "
        "overlap, and it makes a hang of the watchdog likelier", f"{TORCH}; {_SAME_ISSUE}",
        "unset it, and read durations from a profiler trace", when=_ON),
    "TORCH_NCCL_DESYNC_DEBUG": Remark(
        "harms_overlap", "it turns on the timing events too", f"{TORCH}; {_SAME_ISSUE}", when=_ON),
    "TORCH_DISTRIBUTED_DEBUG": Remark(
        "harms_overlap", "DETAIL checks every collective with collectives of its own, on every rank",
        "torch.distributed docs, Debugging", when=("detail",)),
    "TORCH_NCCL_NAN_CHECK": Remark(
        "debug_only", "every buffer is read once more before it is sent, to look for NaN", TORCH, when=_ON),
    "TORCH_NCCL_HIGH_PRIORITY": Remark(
        "fine", "communication kernels are scheduled before compute: good for overlap", TORCH, "", when=_ON),
    "TORCH_NCCL_AVOID_RECORD_STREAMS": Remark(
        "deprecated", "keeping buffers alive by reference is the default by now; torch only warns of the variable",
        "torch ProcessGroupNCCL.cpp", "unset it", except_for=()),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": Remark(
        "deprecated", "the flight recorder's older name", TORCH, "use TORCH_FR_BUFFER_SIZE", except_for=()),
    "CUDA_LAUNCH_BLOCKING": Remark(
        "harms_overlap", "every kernel is waited for before the next is launched: there is no overlap at all",
        "CUDA programming guide, Environment Variables", "unset it", when=("1",)),
    "GLOO_SOCKET_IFNAME": Remark(
        "fine", "the course's own ranks set it themselves; it matters to your scripts", "course_lib.launch.rank", "",
        except_for=()),
}
