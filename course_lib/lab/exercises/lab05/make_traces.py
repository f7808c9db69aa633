"""How the given traces of exercise 5.4 were made: `python -m course_lib.lab.exercises.lab05.make_traces FOLDER`.

Each is a run of `course_lib.train` on real ranks with an emulated device, a paced wire of 1 Gbit/s and 2 ms, and
torch.profiler. From what the profiler wrote, everything is left out but the events that say when the device, the wire
and the steps ran.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from course_lib.lab.workbench.profiled import profiled_run
from course_lib.launch import Fabric
from course_lib.train import emulated

RECIPES: dict[str, dict[str, Any]] = {
    "A": {"ranks": 4, "strategy": "bucketed", "options": {"bucket_mb": 1, "first_bucket_mb": None},
          "late_ms": {1: 200, 2: 200}, "layer_ms": (2, 4)},
    "B": {"ranks": 2, "strategy": "no_sync", "options": {}, "layer_ms": (3, 6)},
    "C": {"ranks": 2, "strategy": "bucketed", "options": {"bucket_mb": 1, "first_bucket_mb": None},
          "layer_ms": (1, 2)},
}  # fmt: skip
"""Eight layers of 0.5 MB each; `layer_ms` are the milliseconds of a layer's forward and backward."""


def make(folder: Path) -> None:
    """Run the recipes and write their traces below `folder`."""
    wire = Fabric(gbit=1.0, latency_us=2000, kind="paced")
    for name, recipe in RECIPES.items():
        forward_ms, backward_ms = recipe["layer_ms"]
        model = partial(emulated.equal, 8, 0.5, forward_ms, backward_ms)
        run = profiled_run(model, recipe["strategy"], recipe["options"], ranks=recipe["ranks"], fabric=wire, steps=3,
                           late_ms=recipe.get("late_ms"))
        (folder / name).mkdir(parents=True, exist_ok=True)
        for path in sorted(run.folder.glob("*.json")):
            (folder / name / path.name).write_text(_small(json.loads(path.read_text())), encoding="utf-8")


def _small(document: dict[str, Any]) -> str:
    """What a reader needs: who, when the clock began, and the events of device, wire and steps, a line each."""
    ours = ("emulated::", "wire::", "course::step")
    events = [{key: e[key] for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur")}
              for e in document["traceEvents"] if e.get("ph") == "X" and e.get("name", "").startswith(ours)]
    head = {key: document[key] for key in ("schemaVersion", "baseTimeNanoseconds", "displayTimeUnit",
                                           "distributedInfo") if key in document}
    lines = ",\n".join(json.dumps(event) for event in events)
    return json.dumps(head)[:-1] + f', "traceEvents": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    make(Path(sys.argv[1]))
