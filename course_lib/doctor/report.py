"""The report as text of 80 columns, and as JSON whose keys scripts can count on."""

from __future__ import annotations

from dataclasses import asdict
from typing import IO, Any

from rich.markup import escape
from rich.table import Table

from course_lib import __version__
from course_lib.doctor.finding import LEVELS, Finding, Level, Report, Section
from course_lib.terminal import console

FORMAT = 1
NAME_COLUMNS = 18
MARKS: dict[Level, str] = {"ok": "ok", "note": "note", "warn": "warn", "fail": "FAIL"}
STYLES: dict[Level, str] = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "bold red"}


def as_json(report: Report) -> dict[str, Any]:
    """`format` grows when a key changes its meaning; keys are only ever added without that."""
    return {
        "format": FORMAT,
        "course": __version__,
        "ok": report.ok,
        "seconds": round(report.seconds, 2),
        "counts": {level: sum(f.level == level for f in report.findings) for level in LEVELS},
        "sections": {section.name: [asdict(finding) for finding in section.findings] for section in report.sections},
    }


def as_text(report: Report, file: IO[str]) -> None:
    """Write tables. Without a terminal they are plain text of 80 columns; levels are words, not only colours."""
    out = console(file)
    for section in report.sections:
        out.print(_table(section))
        out.print()
    out.print(_conclusion(report))


def _table(section: Section) -> Table:
    table = Table(title=section.title, title_justify="left", title_style="bold", box=None, expand=True,
                  show_header=False, padding=(0, 1))
    table.add_column("level", width=4, no_wrap=True)
    # Names of variables are long and must not break: they get lines of their own.
    beside = all(len(finding.title) <= NAME_COLUMNS for finding in section.findings)
    if beside:
        table.add_column("what", width=NAME_COLUMNS)
    table.add_column("found", ratio=1, overflow="fold")
    for finding in section.findings:
        level = f"[{STYLES[finding.level]}]{MARKS[finding.level]}[/]"
        table.add_row(*((level, escape(finding.title), _found(finding)) if beside else (level, _named(finding))))
    if not section.findings:
        table.add_row(f"[{STYLES['ok']}]ok[/]", "nothing is set", "")
    return table


def _found(finding: Finding) -> str:
    text = f"[bold]{escape(finding.value)}[/]"
    if finding.detail:
        text += f"  {escape(finding.detail)}"
    if finding.remedy:
        text += f"\n→ {escape(finding.remedy)}"
    return text


def _named(finding: Finding) -> str:
    lines = [f"[bold]{escape(finding.title)}[/] = {escape(finding.value)}", escape(finding.detail)]
    if finding.remedy:
        lines.append(f"→ {escape(finding.remedy)}")
    if finding.source:
        lines.append(f"[dim]({escape(finding.source)})[/]")
    return "\n".join(lines)


def _conclusion(report: Report) -> str:
    took = f"({report.seconds:.1f}\N{NO-BREAK SPACE}s)"
    failed = [escape(f.title) for f in report.findings if f.level == "fail"]
    if failed:
        return f"[bold red]Labs will not run:[/] {', '.join(failed)}. The lines marked FAIL say what to do. {took}"
    warned = [escape(f.title) for f in report.findings if f.level == "warn"]
    look = f"Worth a look: {', '.join(warned)}." if warned else "No warnings."
    return f"Everything that a lab needs works here. {look} {took}"
