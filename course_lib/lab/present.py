"""Showing something in a notebook as HTML, and anywhere else as text.

The HTML takes its colours from the page, so it reads well on dark themes and on hosts that drop styles.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape

from course_lib.lab.model import CheckResult, Row

GREEN, RED = "#009E73", "#D55E00"
"""Okabe–Ito's bluish green and vermilion: told apart by people who see colours differently."""


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this code. IPython is never imported just to ask."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")


def show(html: str, text: str) -> None:
    """Display `html` in a notebook (with `text` for whoever stores it), print `text` elsewhere."""
    if not in_notebook():
        print(text)
        return
    from IPython.display import display

    display({"text/html": html, "text/plain": text}, raw=True)


def note(text: str) -> None:
    """A paragraph or several, divided by empty lines."""
    show("".join(f"<p>{escape(part)}</p>" for part in text.split("\n\n")), text)


def result_as_text(result: CheckResult) -> str:
    """The table of a check as lines of text."""
    lines = [_headline(result)]
    for row in result.rows:
        lines.append(f"  {_sign(row)} {row.name}")
        if not row.ok:
            lines += [f"      expected: {row.expected}", f"      seen:     {row.seen}"]
    if result.diagnosis:
        lines += ["", f"What this looks like: {result.diagnosis}"]
    return "\n".join([*lines, "", _drawn(result)])


def result_as_html(result: CheckResult) -> str:
    """The table of a check as an accessible HTML table."""
    heads = ("", "check", "expected", "seen") if not result.ok else ("", "check", "seen")
    cell = "text-align:left;vertical-align:top;padding:.2em .8em .2em 0;background:transparent;color:inherit"
    head = "".join(f'<th scope="col" style="{cell}">{name or _spoken("result")}</th>' for name in heads)
    body = "".join(f"<tr>{_row_cells(row, cell, heads)}</tr>" for row in result.rows)
    diagnosis = f"<p><strong>What this looks like.</strong> {escape(result.diagnosis)}</p>" if result.diagnosis else ""
    return (
        f'<table style="border-collapse:collapse;background:transparent;color:inherit">'
        f'<caption style="text-align:left;color:inherit"><strong>{escape(_headline(result))}</strong></caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{diagnosis}<p><small>{_drawn(result)}</small></p>"
    )


def _row_cells(row: Row, style: str, heads: Sequence[str]) -> str:
    colour = GREEN if row.ok else RED
    word = "passed" if row.ok else "failed"
    sign = f'<td style="{style}"><b aria-label="{word}" title="{word}" style="color:{colour}">{_sign(row)}</b></td>'
    name = f'<th scope="row" style="{style};font-weight:normal">{escape(row.name)}</th>'
    texts = {"expected": row.expected, "seen": row.seen}
    return sign + name + "".join(f'<td style="{style}">{escape(texts[h])}</td>' for h in heads if h in texts)


def _spoken(word: str) -> str:
    """A word for screen readers where the eye needs none."""
    return f'<span style="position:absolute;left:-9999px">{word}</span>'


def _sign(row: Row) -> str:
    return "✔" if row.ok else "✘"


def _headline(result: CheckResult) -> str:
    failed = sum(not row.ok for row in result.rows)
    count = f"{failed} of {len(result.rows)} failed" if failed else f"all {len(result.rows)} passed"
    return f"Exercise {result.exercise}, {result.title}: {count}"


def _drawn(result: CheckResult) -> str:
    return f"The cases were drawn with seed {result.seed}."
