"""How fast ranks start, and how light the package is to import."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from course_lib.launch import Fabric, run
from course_lib.launch.fabric import shaped_works
from course_lib.spread import half_iqr
from tests.benchmarks.harness import Figure, benchmark


@benchmark
def warm_run() -> Iterator[Figure]:
    """Seconds of `run(int, ranks=2)` once the fork server is up: processes, wires, group and results."""
    fabrics = ["loopback", "paced"] + (["shaped"] if shaped_works() else [])
    for kind in fabrics:
        fabric = Fabric(kind=kind)
        for _ in range(3):
            run(int, ranks=2, fabric=fabric)
        time.sleep(4)  # the server loads more modules once it is idle
        times = []
        for _ in range(15):
            start = time.perf_counter()
            run(int, ranks=2, fabric=fabric)
            times.append(time.perf_counter() - start)
        yield Figure(f"warm run of two ranks, {kind}", statistics.median(times), "s", half_iqr(times), 0.15, "<=")


@benchmark
def import_time() -> Iterator[Figure]:
    """Seconds that `import course_lib` adds to starting Python, in alternation with an empty program."""
    added = []
    for _ in range(15):
        took = []
        for code in ("pass", "import course_lib"):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            took.append(time.perf_counter() - start)
        added.append(took[1] - took[0])
    yield Figure("import course_lib", statistics.median(added), "s", half_iqr(added), 0.1, "<=")
    loaded = subprocess.run([sys.executable, "-c", "import sys, course_lib; print('torch' in sys.modules)"],
                            capture_output=True, text=True, check=True)
    yield Figure("torch is loaded by import course_lib", float(loaded.stdout.strip() == "True"), "yes=1", 0.0, 0, "<=")
