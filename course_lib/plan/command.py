"""`course plan`: every layout of a run, fastest first, and why others are slower, too large or impossible."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from course_lib.plan.footprint import usable
from course_lib.plan.hardware import GIB, GPUS, Cluster
from course_lib.plan.published import memory_shortfall, sources
from course_lib.plan.search import NAMES, Found, Plan, slower_because
from course_lib.plan.shape import ModelShape
from course_lib.plan.timing import INTERFERENCE
from course_lib.plan.validate import compare, median_error, most_mfu, summaries
from course_lib.terminal import console

FORMAT = 1
NEAR = 0.01
"""Plans that differ in interleaving only are one row, which counts those within this share of the fastest."""
RECOMPUTES = {"alternate": "backward computes every second matrix product again",
              "full": "backward computes whole layers again"}
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
        shown = _by_layout(found.fitting)[:top]
        out.print(_table("Fastest that fit", shown, shape, cluster))
        _legend(shown, shape, cluster)
        _details(found.fitting[0])
    if best:
        out.print(Text("\nBest for each data-parallel degree D", style="bold"))
        for D, plan in sorted(({best.step.D: best} | found.best_by_degree()).items()):
            out.print(Text(f"D = {D}: {_name(plan)}, N = {plan.step.N}, {plan.step.total:.2f} s, "
                           f"{slower_because(plan, best)}"))
    if found.too_large:
        parts = ", ".join(f"{count} by {part}" for part, count in
                          Counter(plan.memory.largest for plan in found.too_large).most_common())
        nearest = min(found.too_large, key=lambda plan: plan.memory.total)
        out.print(Text(f"\n{len(found.too_large)} layouts need more memory than there is", style="bold"))
        out.print(f"{parts}. The nearest, {_name(nearest)}, {nearest.refused}.")
    if found.impossible:
        out.print(Text(f"\n{sum(count for count, _ in found.impossible)} layouts are impossible", style="bold"))
        for count, sentence in found.impossible:
            out.print(f"{count}: {sentence}")


def _details(plan: Plan) -> None:
    out = console(sys.stdout)
    out.print(Text(f"\nThe first, {_name(plan)}, by part", style="bold"))
    memory = ", ".join(f"{part} {size / GIB:.1f}" for part, size in plan.memory.parts().items())
    seconds = ", ".join(f"{NAMES[part]} {value:.2f}" for part, value in plan.step.parts().items())
    out.print(f"Memory in GiB: {memory}. Working is what comes and goes within a step: the loss, the layer that is "
              f"computed, gathered weights.\nStep in seconds: {seconds}.")


def _name(plan: Plan) -> str:
    """With D = 1, no stage of ZeRO shards anything."""
    return str(plan.layout if plan.step.D > 1 else replace(plan.layout, stage=0))


def _by_layout(plans: Sequence[Plan]) -> list[tuple[Plan, int]]:
    """The fastest of those that differ in interleaving only, and how many of the others are within `NEAR` of it."""
    groups: dict[Any, list[Plan]] = {}
    for plan in plans:
        groups.setdefault(replace(plan.layout, interleaved=1), []).append(plan)
    return [(best, sum(p.step.total <= (1 + NEAR) * best.step.total for p in others))
            for best, *others in groups.values()]


def _legend(shown: Sequence[tuple[Plan, int]], shape: ModelShape, cluster: Cluster) -> None:
    plans, out = [plan for plan, _ in shown], console(sys.stdout)
    layouts = [plan.layout for plan in plans]
    said = ["TP·PP: tensor-parallel ranks · pipeline stages"]
    said += ["v: parts of the model on each stage"] * any(one.interleaved > 1 for one in layouts)
    said += [f"+n: n more v within {NEAR:.0%}"] * any(more for _, more in shown)
    said += [f"recompute {kind}: {RECOMPUTES[kind]}" for kind in RECOMPUTES if kind in {o.recompute for o in layouts}]
    said += ["b: rows of a micro-step", "D: replicas", "ZeRO: what they shard (–: nothing)",
             "N: micro-steps of an update", "time: share of s, of communication what is exposed"]
    out.print("; ".join(said) + ".")
    out.print("Assumed: fused attention, sequence parallelism with TP, no dropout.")
    if any(plan.tight for plan in plans):
        out.print(f"* tight: fits {usable(cluster) / GIB:.1f} GiB only if predicted well; a published run took "
                  f"{memory_shortfall() - 1:.0%} more than predicted. Try it first.")
    most = most_mfu(cluster.gpu.name)
    beyond = most is not None and max(plan.step.mfu(shape, cluster) for plan in plans) > most
    out.print(f"s and MFU are a model's: in --validate its times are off by {median_error():.0%} in the median, so "
              "rows that are closer are as good as equal." + beyond * " The published runs there reach "
              f"{most or 0:.0%} MFU at most on this GPU: more is confirmed by none.")


def _table(title: str, rows: Sequence[tuple[Plan, int]], shape: ModelShape, cluster: Cluster) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    table.add_column("layout", vertical="bottom")
    for name in ("ZeRO", "D", "N", "GiB", "s", "bubble\ntime", "TP\ntime", "PP\ntime", "DP\ntime", "MFU", "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for plan, more in rows:
        s, sharded = plan.step, plan.layout.stage if plan.step.D > 1 else 0
        table.add_row(str(replace(plan.layout, stage=0)) + f" +{more}" * bool(more), str(sharded or "–"), str(s.D),
                      str(s.N), f"{plan.memory.total / GIB:.1f}" + ("*" if plan.tight else ""), f"{s.total:.2f}",
                      *(f"{part / s.total:.1%}" for part in (s.bubble, s.tensor, s.pipeline, s.data)),
                      f"{s.mfu(shape, cluster):.1%}", f"{s.tokens_per_s:,.0f}")
    return table


def as_json(found: Found, shape: ModelShape, cluster: Cluster, B: int, best: Plan | None) -> str:
    """Everything, with stable keys; bytes and seconds."""

    def one(plan: Plan) -> dict[str, Any]:
        s = plan.step
        return {"layout": asdict(plan.layout), "D": s.D, "N": s.N, "fits": plan.fits, "tight": plan.tight,
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
    for name in ("source", "run"):
        table.add_column(name)
    for name in ("published", "predicted", "error", *["left out"] * leave_out):
        table.add_column(name, justify="right")
    for row in rows:
        scale, unit = {"bytes": (GIB, " GiB"), "s": (1.0, " s"), "MFU": (0.01, " %")}[row.unit]
        table.add_row(row.source, row.name, f"{row.published / scale:.2f}{unit}", f"{row.predicted / scale:.2f}",
                      f"{row.error:+.1%}", *["" if row.left_out is None else f"{row.left_out:+.1%}"] * leave_out)
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
