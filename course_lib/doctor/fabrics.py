"""Which wires really work here: each fabric is tried with two ranks that reduce a buffer over it.

An installed tool proves nothing, and neither does the exit code of `unshare`; only a run does.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any

from course_lib.doctor.finding import Finding, Level
from course_lib.launch.ceiling import SAFE_GBIT, ceiling_gbit
from course_lib.launch.client import run, warm_up
from course_lib.launch.fabric import Fabric, gpus, shaped_works
from course_lib.launch.request import RankFailed, RunError

RANKS, MB, ASKED_GBIT, OFF_BY = 2, 2**20, 1.0, 0.25
TOOLS = ("ip", "tc")
INSTALL = "install iproute2 (Debian, Ubuntu, Alpine, Arch: package iproute2; Fedora: iproute and iproute-tc)"
ALLOW = ("allow user namespaces: sysctl user.max_user_namespaces above 0, on Ubuntu 24.04 also "
         "kernel.apparmor_restrict_unprivileged_userns=0; in a container, ask for CAP_SYS_ADMIN")
MODULES = "load the kernel modules veth, bridge and sch_tbf"


@dataclass(frozen=True)
class Trial:
    """What came of a run over one kind of fabric."""

    kind: str
    error: str = ""
    gbit: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


def examine() -> tuple[tuple[Finding, ...], dict[str, Any]]:
    """The findings, and what a rank said of its torch. Starts and ends a few runs, one after the other."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return (Finding("fabrics", "note", "fabrics", "not tried", "under torchrun the ranks are there already",
                        "call course doctor without torchrun"),), {}
    if broken := why_no_ranks():
        none = {kind: Trial(kind, broken) for kind in ("paced", "shaped", "loopback")}
        return (carried(none["paced"], "fail"), carried(none["shaped"], "fail"), nccl(broken),
                ceiling(none["loopback"]), chosen(none["paced"], none["shaped"])), {}
    paced = attempt("paced")
    works = shaped_works()
    shaped = attempt("shaped") if works else Trial("shaped", "not tried")
    unlimited = _tried("loopback", lambda: [(ceiling_gbit(RANKS), {})])
    found = (carried(paced, "fail"), carried(shaped, "note") if works else unshaped(why_not_shaped()), nccl(),
             ceiling(unlimited), chosen(paced, shaped))
    return found, paced.facts


def why_no_ranks() -> str:
    """Why the process that starts ranks cannot start itself; empty if it can. Then no fabric is worth a trial."""
    try:
        warm_up()
        return ""
    except (RunError, OSError) as error:
        reason = str(error).splitlines()[0]
    try:
        done = subprocess.run([sys.executable, "-c", "import torch.distributed"], capture_output=True, text=True,
                              timeout=60, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return reason
    lines = done.stderr.strip().splitlines()
    return f"torch cannot be loaded: {lines[-1]}" if done.returncode and lines else reason


def probe(device: str = "cpu") -> tuple[float, dict[str, Any]]:
    """On a rank: Gbit/s that leave it in an all-reduce of 2 MB, the best of five, and what its torch is.

    The facts are plain values: torch's own version type would bring torch into the process that asked.
    """
    import torch
    import torch.distributed as dist

    from course_lib.record import now

    buffer, world = torch.zeros(MB // 2, device=device), dist.get_world_size()
    times = []
    for _ in range(6):
        dist.barrier()
        start = now()
        dist.all_reduce(buffer)
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(now() - start)
    sent = 2 * (world - 1) / world * buffer.nbytes
    has_nccl = torch.version.cuda is not None and dist.is_nccl_available()
    facts = {"torch": str(torch.__version__), "cuda": torch.version.cuda and str(torch.version.cuda),
             "cuda_devices": torch.cuda.device_count(),
             "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
             "gloo": dist.is_gloo_available(), "threads": torch.get_num_threads()}
    return 8 * sent / min(times[1:]), facts


def attempt(kind: str, device: str = "cpu") -> Trial:
    """Two ranks over a fabric of this kind. What ranks print is not part of the report and is dropped."""
    limited = {"gbit": ASKED_GBIT} if kind != "nccl" else {}
    return _tried(kind, lambda: run(probe, device, ranks=RANKS, fabric=Fabric(kind=kind, **limited), timeout_s=30))


def _tried(kind: str, start: Callable[[], list]) -> Trial:
    try:
        with redirect_stdout(io.StringIO()):
            results = start()
    except RankFailed as error:
        return Trial(kind, error.traceback_text.strip().splitlines()[-1])
    except (RunError, ValueError, OSError) as error:
        return Trial(kind, str(error).splitlines()[0])
    return Trial(kind, "", min(gbit for gbit, _ in results), results[0][1])


def carried(trial: Trial, on_failure: Level) -> Finding:
    """A verdict on a fabric whose rate was asked for. `on_failure` tells whether labs can do without it."""
    data = {"works": not trial.error, "asked_gbit": ASKED_GBIT, "gbit": trial.gbit or None}
    if trial.error:
        return Finding(trial.kind, on_failure, trial.kind, "does not work", trial.error,
                       "correct what this names; a broken torch: pip install --force-reinstall torch"
                       if on_failure == "fail" else "use fabric=\"paced\"", data=data)
    off = abs(trial.gbit / ASKED_GBIT - 1) > OFF_BY
    said = f"asked for {ASKED_GBIT:g} Gbit/s, carried {trial.gbit:.2f} at best"
    return Finding(trial.kind, "warn" if off else "ok", trial.kind, "works", said,
                   "the machine was busy: run this again before you trust a timing" if off else "", data=data)


def unshaped(reason: str) -> Finding:
    """The kernel's wires are missing: no harm, since the paced ones carry every lab."""
    return Finding("shaped", "note", "shaped", "does not work", f"{reason}. Labs use paced wires instead",
                   remedy_for(reason), data={"works": False, "asked_gbit": None, "gbit": None})


def why_not_shaped() -> str:
    """In a sentence, by trying again and listening this time."""
    if sys.platform != "linux":
        return "it needs Linux"
    if missing := missing_tools():
        return f"{' and '.join(missing)} not found"
    code = "from course_lib.launch.netns import trial; trial()"
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30,
                          stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path})
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else "the trial ended without a word"


def missing_tools() -> tuple[str, ...]:
    """Which of ip and tc are neither on the path nor where systems keep them."""
    return tuple(tool for tool in TOOLS if not (shutil.which(tool) or shutil.which(tool, path="/usr/sbin:/sbin")))


def remedy_for(reason: str) -> str:
    """What to install or to ask for."""
    if reason == "it needs Linux":
        return ""
    if "not found" in reason or "not installed" in reason:
        return INSTALL
    return MODULES if "not supported" in reason or "Unknown device" in reason or "RTNETLINK" in reason else ALLOW


def nccl(broken: str = "") -> Finding:
    """The nccl fabric, tried where two GPUs are visible, unless no rank can start at all."""
    count = gpus()
    if count < RANKS:
        return Finding("nccl_fabric", "note", "nccl", "not here", f"{RANKS} ranks need {RANKS} GPUs, {count} visible",
                       data={"works": False, "gpus": count, "gbit": None})
    trial = Trial("nccl", broken) if broken else attempt("nccl", "cuda")
    data = {"works": not trial.error, "gpus": count, "gbit": trial.gbit or None}
    if trial.error:
        return Finding("nccl_fabric", "warn", "nccl", "does not work", trial.error,
                       "set NCCL_DEBUG=WARN and try again; fabric=\"shaped\" carries CUDA tensors too", data=data)
    return Finding("nccl_fabric", "ok", "nccl", "works", f"carried {trial.gbit:.1f} Gbit/s in a small all-reduce",
                   data=data)


def ceiling(trial: Trial) -> Finding:
    """How fast plain gloo is here. Above it an absolute rate is refused, and presets are scaled anyway."""
    data = {"works": not trial.error, "gbit": trial.gbit or None, "ranks": RANKS}
    if trial.error:
        return Finding("loopback", "fail", "loopback", "does not work", trial.error,
                       "gloo must be able to open connections on 127.0.0.1", data=data)
    slow = trial.gbit < SAFE_GBIT
    return Finding("loopback", "warn" if slow else "ok", "wire ceiling", f"{trial.gbit:.1f} Gbit/s",
                   f"a rank, {RANKS} ranks, unlimited gloo; higher absolute rates are refused",
                   f"labs take {SAFE_GBIT:g} Gbit/s for granted: run this again when it is quiet" if slow else "",
                   data=data)


def chosen(paced: Trial, shaped: Trial) -> Finding:
    """What fabric="auto" will take for two ranks."""
    kind = "nccl" if gpus() >= RANKS else "paced" if shaped.error else "shaped"
    if kind == "paced" and paced.error:
        return Finding("auto", "fail", "fabric=\"auto\"", "nothing works", "see above", data={"kind": None})
    return Finding("auto", "ok", "fabric=\"auto\"", kind, f"for {RANKS} ranks", data={"kind": kind})
