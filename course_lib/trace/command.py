"""`course trace`: tables, sentences and diagnosis of trace files, for people and (`--json`) for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from course_lib.overlap import Report, Row
from course_lib.trace.diagnose import Finding, diagnose
from course_lib.trace.host import CpuRule
from course_lib.trace.measure import measure, pooled_waits, waits
from course_lib.trace.reader import Trace, load

COLUMNS = ("rank", "step", "T ms", "compute", "comm", "exposed", "hidden", "overlap", "share", "busy", "wait",
           "transfer")
SHOWN = 200
"""Rows of single steps in a table for people, half of them from the beginning and half from the end."""


def run(paths: Sequence[Path], *, step: int | None = None, as_json: bool = False, html: Path | None = None,
        cpu: CpuRule | None = None, unprofiled_ms: float | None = None, write: Callable[[str], object] = print) -> None:
    """Read the files and say what is in them. Raises `TraceError` for what cannot be read, `OSError` when the page
    cannot be written."""
    trace = load(*paths, cpu=cpu)
    found = measure(trace, step)
    findings = diagnose(trace, found, unprofiled_ms=unprofiled_ms)
    if as_json:
        write(json.dumps(summary(trace, found, findings), indent=1))
    else:
        _print(trace, found, findings)
    if html is not None:
        from course_lib.trace.page import page

        html.write_text(page(trace, found, findings, step), encoding="utf-8", errors="backslashreplace")
        if not as_json:
            write(f"{html} written")


def cells(row: Row, wait: tuple[int, int] | None) -> tuple[str, ...]:
    """One row of the table as text. `–` stands for "there was none to measure", `unknown` for "cannot know"."""
    none = "–" if row.comm == 0 else "unknown"
    return ("all" if row.rank is None else str(row.rank), "all" if row.step is None else
            "whole" if row.step < 0 else str(row.step), _ms(row.span), _ms(row.compute), _ms(row.comm),
            _ms(row.exposed, none), _ms(row.hidden, none), _percent(row.overlap, none), _percent(row.share),
            _percent(row.busy), *((_ms(wait[0]), _ms(wait[1])) if wait else ("–", "–")))


def table_rows(found: Report) -> list[tuple[str, ...]]:
    """Per rank and step, then pooled per rank, then over all; pooled rows only where they pool something."""
    each = {**waits(found), **pooled_waits(found)}
    rows = [*found.rows, *(r for r in found.ranks if r.steps > 1), *([found.pooled] if len(found.ranks) > 1 else [])]
    return [cells(r, each.get((r.rank, r.step))) for r in rows]


def shown_rows(found: Report) -> tuple[list[tuple[str, ...]], str]:
    """What of `table_rows` a person reads, and a sentence on what was left out of the middle ("" if nothing was)."""
    rows = table_rows(found)
    if len(found.rows) <= SHOWN:
        return rows, ""
    gap = slice(SHOWN // 2, len(found.rows) - SHOWN // 2)
    left_out = (f"{gap.stop - gap.start} of {len(found.rows)} rows of single steps are not shown; they count in all "
                "that follows. --step shows one step, --json has all.")
    return [row for i, row in enumerate(rows) if not gap.start <= i < gap.stop], left_out


def summary(trace: Trace, found: Report, findings: Sequence[Finding]) -> dict[str, Any]:
    """Everything as JSON types. Times are nanoseconds; null means that there was none or that it cannot be known, and
    the row's `sentence` says which."""
    each = {**waits(found), **pooled_waits(found)}

    def row(r: Row) -> dict[str, Any]:
        wait = each.get((r.rank, r.step))
        return asdict(r) | {"overlap": r.overlap, "share": r.share, "busy": r.busy, "compute_busy": r.compute_busy,
                            "sentence": r.sentence, "wait": wait and wait[0], "transfer": wait and wait[1]}

    return {
        "provenance": trace.timeline.provenance, "unit": "ns", "sentence": found.sentence, "late": list(found.late),
        "step_time": found.step_time, "variation": found.variation,
        "files": [{"rank": r.rank, "name": r.name, "device": r.facts.device, "collectives": r.facts.collectives,
                   "described": r.facts.described, "notes": [asdict(n) for n in r.notes]} for r in trace.ranks],
        "rows": [row(r) for r in found.rows], "ranks": [row(r) for r in found.ranks], "pooled": row(found.pooled),
        "diagnosis": [asdict(f) for f in findings],
    }


def _print(trace: Trace, found: Report, findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        # A pipe has no width; cut columns would be of no use to whoever reads it.
        console = Console(width=130)
    table = Table(title=f"{len(trace.ranks)} file{'s' * (len(trace.ranks) != 1)}, {trace.timeline.provenance}; "
                        "times in ms", title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    rows, left_out = shown_rows(found)
    for row in rows:
        table.add_row(*row, style="bold" if "all" in row[:2] else None)
    console.print(table)
    if left_out:
        console.print(Text(left_out, style="dim"))
    for rank in found.ranks if len(found.ranks) > 1 else ():
        console.print(Text(f"rank {rank.rank}: {rank.sentence}"))
    console.print(Text(found.sentence, style="bold"))
    together: dict[str, tuple[list[int], int]] = {}
    for rank, note in trace.notes:
        who, count = together.get(note.text, ([], 0))
        together[note.text] = [*who, rank.rank], count + note.count
    for text, (who, count) in together.items():
        many = f" ({count} in all)" if count > len(who) else ""
        console.print(Text(f"note, rank {', '.join(map(str, who))}: {text}{many}", style="dim"))
    console.print(Text("\nDiagnosis", style="bold"))
    for finding in findings:
        because = f"\n  Evidence: {finding.evidence}\n  Next: {finding.do}"
        console.print(Text.assemble("• ", (finding.says, "bold"), because))
    if not findings:
        console.print(Text("Nothing stands out: no rule found evidence of a known cause."))


def _ms(ns: int | None, none: str = "unknown") -> str:
    return none if ns is None else f"{ns / 1e6:.3f}"


def _percent(share: float | None, none: str = "unknown") -> str:
    return none if share is None else f"{100 * share:.2f} %"
