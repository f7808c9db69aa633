"""Published training runs as rows that a prediction can be held against."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from course_lib.plan.footprint import Footprint, footprint
from course_lib.plan.hardware import Cluster, Efficiency, cluster
from course_lib.plan.layout import Layout, split
from course_lib.plan.shape import ModelShape, model
from course_lib.plan.timing import step
from course_lib.plan.volumes import Impossible


@dataclass(frozen=True)
class TimeRow:
    """A run of known layout and the seconds that one update took. `fitted`: the efficiencies were fitted to its source.
    """

    source: str
    name: str
    shape: ModelShape
    cluster: Cluster
    layout: Layout
    B: int
    seconds: float
    fitted: bool
    mfu: float | None = None
    """Where the source gives it."""

    def predicted(self, efficiency: Efficiency | None = None) -> float:
        """Seconds by the model, with the GPU's own efficiency or another."""
        where = self.cluster.with_efficiency(efficiency) if efficiency else self.cluster
        return step(self.shape, where, self.layout, self.B).total

    def published_mfu(self) -> float:
        """By this package's count of the model's FLOPs."""
        done = self.shape.flops_per_token * self.B * self.shape.length
        return done / (self.seconds * self.cluster.gpus * self.cluster.gpu.flops)

    def predicted_mfu(self) -> float:
        return step(self.shape, self.cluster, self.layout, self.B).mfu(self.shape, self.cluster)


@dataclass(frozen=True)
class MemoryRow:
    """A run of known layout and bytes of one GPU: of its activations, its states (parameters, gradients and optimizer),
    or in total."""

    source: str
    name: str
    shape: ModelShape
    layout: Layout
    gpus: int
    B: int
    of: str
    bytes: float

    def predicted(self) -> float:
        found: Footprint = footprint(self.shape, self.layout, *split(self.layout, self.shape, self.gpus, self.B))
        states = found.parameters + found.gradients + found.optimizer
        return {"activations": found.activations, "states": states, "total": found.total}[self.of]


def sources() -> dict[str, dict]:
    """What is cited, by name: `cite`, `url`, `note`."""
    return _package()["sources"]


def time_rows() -> list[TimeRow]:
    found, told = [], sources()
    for row in _package()["time"]:
        shape, gpus = model(row["model"], row.get("seq")), row["gpus"]
        found.append(TimeRow(row["source"], row["name"], shape, cluster(row["gpu"], gpus), Layout(**row["layout"]),
                             row["B"], _seconds(row, shape), told[row["source"]]["fitted"], row.get("mfu")))
    return found


def memory_rows() -> list[MemoryRow]:
    found = []
    for row in _package()["memory"]:
        shape, layout = model(row["model"]), Layout(**row["layout"])
        if row["of"] == "states":
            # The paper's figure counts the layers alone.
            shape = ModelShape(shape.layers, shape.width, shape.heads, vocab=0, length=0)
        found.append(MemoryRow(row["source"], row["name"], shape, layout, row["gpus"], row["B"], row["of"],
                               row["gib"] * 2**30))
    return found


def llm_foundry_rows(path: Path) -> list[TimeRow]:
    """Rows of llm-foundry's benchmark table (CSV, github.com/mosaicml/llm-foundry, scripts/train/benchmarking). Runs in
    fp8 are left out. Raises `Impossible` for another kind of file."""
    found = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as wrong:
        raise Impossible(f"{path} is no table of text: {wrong}") from None
    for number, row in enumerate(rows, 2):
        try:
            if "fp8" not in row["Precision"]:
                found.append(_llm_foundry_row(row))
        except (KeyError, TypeError, ValueError, ArithmeticError) as wrong:
            raise Impossible(f"{path}, line {number}: not a row of llm-foundry's table ({wrong!r})") from None
    if not rows:
        raise Impossible(f"{path} has no rows: give llm-foundry's table")
    return found


def _llm_foundry_row(row: dict[str, str]) -> TimeRow:
    length, gpus, b, N = (int(row[name]) for name in ("SeqLen (T)", "# GPUs", "MicroBatchSize", "GradAccum"))
    gpu = {"a100_40gb": "a100-40", "a100_80gb": "a100-80", "h100_80gb": "h100"}[row["GPU"]]
    layout = Layout(micro_batch=b, stage={"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}[row["Sharding Strategy"]],
                    recompute="full" if row["Activation Checkpointing"] == "True" else "none",
                    fp32_gradients=row["MP Mode"] == "DEFAULT")
    shape = model(row["Model"], length)
    seconds = b * N * length / float(row["Throughput (T/s/GPU)"])
    again = " recompute" if layout.recompute == "full" else ""
    return TimeRow(f"llm-foundry {gpu}", f"{row['Model']} s{length} {gpus} GPUs b{b}{again}", shape, cluster(gpu, gpus),
                   layout, b * N * gpus, seconds, fitted=True)


@lru_cache(maxsize=1)
def memory_shortfall() -> float:
    """How many times the predicted memory a published run took, at worst."""
    return max(row.bytes / row.predicted() for row in memory_rows())


def _seconds(row: dict, shape: ModelShape) -> float:
    """Seconds of an update, in whichever way the source says how fast the run was."""
    tokens = row["B"] * shape.length
    if "seconds" in row:
        return row["seconds"]
    if "gpu_hours" in row:
        return row["gpu_hours"] * 3600 / row["gpus"] * tokens / row["for_tokens"]
    if "tokens_per_s_gpu" in row:
        return tokens / (row["tokens_per_s_gpu"] * row["gpus"])
    h, L = shape.width, shape.layers  # arXiv 2104.04473, equation 3
    flops = 96 * tokens * L * h * h * (1 + shape.length / (6 * h) + shape.vocab / (16 * L * h))
    return flops / (row["hardware_tflops"] * 1e12 * row["gpus"])


def _package() -> dict:
    return json.loads(files("course_lib.plan").joinpath("published.json").read_text(encoding="utf-8"))
