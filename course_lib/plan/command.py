"""`course plan`: every layout of a run, fastest first, and why others are slower, too large or impossible."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from course_lib.plan.hardware import GIB, GPUS, Cluster
from course_lib.plan.published import sources
from course_lib.plan.search import NAMES, Found, Plan, slower_because
from course_lib.plan.shape import ModelShape
from course_lib.plan.timing import INTERFERENCE
from course_lib.plan.validate import compare, summaries
from course_lib.terminal import console

FORMAT = 1
KINDS = {"s": "time", "MFU": "MFU", "bytes": "memory"}


def show(found: Found, shape: ModelShape, cluster: Cluster, B: int, top: int, best: Plan | None) -> None:
    """Tables for people. `best`: what others are compared with, the fastest of all layouts and not only of `found`."""
    out = console(sys.stdout)
    out.print(f"{shape.parameters / 1e9:.2f}B parameters, rows of {shape.length} tokens, B = {B}, "
              f"{cluster.gpus} {cluster.gpu.name} in nodes of {cluster.node}. Predicted, not measured.")
    if not cluster.gpu.calibrated:
        out.print(f"No published run on {cluster.gpu.name} was used: its efficiencies are those of the H100.")
    if not found.fitting:
        out.print(Text("Nothing fits", style="bold"))
    else:
        out.print(_table("Fastest that fit", found.fitting[:top], shape, cluster))
        _details(found.fitting[0])
    if best:
        out.print(Text("\nBest for each data-parallel degree D", style="bold"))
        for D, plan in sorted(({best.step.D: best} | found.best_by_degree()).items()):
            out.print(Text(f"D = {D}: {plan.layout}, N = {plan.step.N}, {plan.step.total:.2f} s, "
                           f"{slower_because(plan, best)}"))
    if found.too_large:
        parts = ", ".join(f"{count} by {part}" for part, count in
                          Counter(plan.memory.largest for plan in found.too_large).most_common())
        nearest = min(found.too_large, key=lambda plan: plan.memory.total)
        out.print(Text(f"\n{len(found.too_large)} layouts need more memory than there is", style="bold"))
        out.print(f"{parts}. The nearest, {nearest.layout}, {nearest.refused}.")
    if found.impossible:
        out.print(Text(f"\n{sum(count for count, _ in found.impossible)} layouts are impossible", style="bold"))
        for count, sentence in found.impossible:
            out.print(f"{count}: {sentence}")


def _details(plan: Plan) -> None:
    out = console(sys.stdout)
    out.print(Text(f"\nThe first, {plan.layout}, by part", style="bold"))
    memory = ", ".join(f"{part} {size / GIB:.1f}" for part, size in plan.memory.parts().items())
    seconds = ", ".join(f"{NAMES[part]} {value:.2f}" for part, value in plan.step.parts().items())
    out.print(f"Memory in GiB: {memory}.\nStep in seconds: {seconds}.")


def _table(title: str, plans: Sequence[Plan], shape: ModelShape, cluster: Cluster) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    table.add_column("layout")
    for name in ("D", "N", "GiB", "s", "bubble", "TP", "PP", "DP", "MFU", "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for plan in plans:
        s = plan.step
        table.add_row(str(plan.layout), str(s.D), str(s.N), f"{plan.memory.total / GIB:.1f}", f"{s.total:.2f}",
                      *(f"{part / s.total:.1%}" for part in (s.bubble, s.tensor, s.pipeline, s.data)),
                      f"{s.mfu(shape, cluster):.1%}", f"{s.tokens_per_s:,.0f}")
    return table


def as_json(found: Found, shape: ModelShape, cluster: Cluster, B: int, best: Plan | None) -> str:
    """Everything, with stable keys; bytes and seconds."""

    def one(plan: Plan) -> dict[str, Any]:
        s = plan.step
        return {"layout": asdict(plan.layout), "D": s.D, "N": s.N, "fits": plan.fits,
                "memory": plan.memory.parts() | {"total": plan.memory.total},
                "seconds": s.parts() | {"total": s.total}, "tokens_per_s": s.tokens_per_s,
                "mfu": s.mfu(shape, cluster), "why": plan.refused or (slower_because(plan, best) if best else "")}

    return json.dumps({
        "format": FORMAT, "model": asdict(shape) | {"parameters": shape.parameters}, "gpu": cluster.gpu.name,
        "gpus": cluster.gpus, "global_batch": B, "layouts": [one(plan) for plan in (*found.fitting, *found.too_large)],
        "impossible": [{"layouts": count, "why": sentence} for count, sentence in found.impossible],
    }, indent=1)


def validate(csv: Path | None, leave_out: bool, as_json: bool) -> None:
    """Every published row beside its prediction, then each source, then the constants that all rows share."""
    rows = compare(csv, leave_out=leave_out)
    if as_json:
        efficiency = {name: gpu.efficiency._asdict() for name, gpu in GPUS.items()}
        print(json.dumps({"format": FORMAT, "efficiency": efficiency, "sources": sources(),
                          "rows": [asdict(row) | {"error": row.error} for row in rows],
                          "summaries": [asdict(s) for s in summaries(rows)]}, indent=1))
        return
    out = console(sys.stdout)
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name, justify in (("source", "left"), ("run", "left"), ("published", "right"), ("predicted", "right"),
                          ("error", "right"), ("left out", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        scale, unit = {"bytes": (GIB, " GiB"), "s": (1.0, " s"), "MFU": (0.01, " %")}[row.unit]
        table.add_row(row.source, row.name, f"{row.published / scale:.2f}{unit}", f"{row.predicted / scale:.2f}",
                      f"{row.error:+.1%}", "" if row.left_out is None else f"{row.left_out:+.1%}")
    out.print(table)
    told = sources()
    for title, errors in (("Error by source", summaries(rows)),
                          ("The same for rows left out of the fit", summaries(rows, leave_out=True))):
        if errors:
            out.print(Text(f"\n{title}", style="bold"))
        for s in errors:
            cited = told.get(s.source, {}).get("cite", s.source)
            out.print(f"{KINDS[s.unit]}: mean {s.mean:.1%}, median {s.median:.1%}, worst {s.worst:.1%} of {s.rows}: "
                      f"{cited}")
    out.print(Text("\nSources that were not fitted, and what is known of them", style="bold"))
    fitted = {row.source for row in rows if row.fitted}
    for name, source in told.items():
        if name not in fitted:
            out.print(f"{source['cite']}: {source['note']}.")
    where = Cluster(GPUS["a100-80"], 8)
    out.print(Text("\nConstants, the same for all rows of a type of GPU", style="bold"))
    out.print(f"assumed for all and not fitted: interference {INTERFERENCE}, a ring's hop {where.hop_s * 1e6:.0f} µs "
              f"inside a node and {where.network_hop_s * 1e6:.0f} µs between nodes")
    for name in ("a100-80", "h100"):
        e = GPUS[name].efficiency
        shares = ", ".join(f"{part} {value:.3f}" for part, value in e._asdict().items())
        out.print(f"{name.partition('-')[0]}: {shares}")
