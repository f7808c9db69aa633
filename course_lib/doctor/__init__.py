"""`course doctor`: does everything that the labs need work here, and what spoils measurements?"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from course_lib.doctor.finding import Finding, Report, Section
from course_lib.doctor.interplay import STRATEGIES

__all__ = ["STRATEGIES", "Finding", "Report", "Section", "examine"]


def examine(strategy: str = "", environ: Mapping[str, str] | None = None) -> Report:
    """Look at everything. Takes some ten seconds, most of them for starting ranks over each kind of wire.

    `strategy` ("ddp", "fsdp2", "megatron-tp") is what CUDA_DEVICE_MAX_CONNECTIONS is judged against. Never raises
    for what it finds; torch is loaded in the ranks only, never in this process.
    """
    from course_lib.doctor import devices, environment, fabrics, machine, noise, notebooks, versions

    start = time.monotonic()
    # The noise is measured before anything else is started, and devices after a rank has said what its torch is.
    quiet = noise.examine()
    around = machine.examine()
    wires, facts = fabrics.examine()
    sections = (
        Section("versions", "Versions", versions.examine()),
        Section("notebooks", "Notebook stack", notebooks.examine()),
        Section("devices", "Devices and links", devices.examine(facts)),
        Section("fabrics", "Fabrics, tried with two ranks", wires),
        Section("environment", "Environment variables of NCCL, torch, gloo and CUDA",
                environment.judge(os.environ if environ is None else environ, strategy=strategy)),
        Section("machine", "Machine", around),
        Section("noise", "Noise", quiet),
    )
    return Report(sections, time.monotonic() - start)
