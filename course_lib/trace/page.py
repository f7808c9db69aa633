"""The report of `course trace --html`: one file with pictures, table and diagnosis that needs no network."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from html import escape

from course_lib.overlap import Report
from course_lib.show import figure, review
from course_lib.show.picture import Picture
from course_lib.show.scene import typical_step
from course_lib.trace.command import COLUMNS, table_rows
from course_lib.trace.diagnose import Finding
from course_lib.trace.measure import measure
from course_lib.trace.reader import Trace

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 1.5em auto; max-width: 1100px; padding: 0 1em; }}
img {{ max-width: 100%; display: block; margin: 1em 0; background: #fff; border-radius: 4px; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
td, th {{ text-align: right; padding: .15em .7em; border-bottom: 1px solid #8886; white-space: nowrap; }}
.wide {{ overflow-x: auto; }}
@media (max-width: 1000px) {{ table {{ font-size: 12px; }} td, th {{ padding: .15em .35em; }} }}
</style>
</head>
<body>
<h1>{title}</h1>
<p><strong>{sentence}</strong></p>
{pictures}
<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>
<p>Times in milliseconds.</p>
<h2>Diagnosis</h2>
<ul>{findings}</ul>
<h2>Files</h2>
<ul>{files}</ul>
</body>
</html>
"""


def page(trace: Trace, found: Report, findings: Sequence[Finding], step: int | None = None) -> str:
    """The page as text. A picture that has nothing to show is left out."""
    files = "".join(f"<li>rank {r.rank}: {escape(r.name)}" + "".join(
        f"<br>{escape(n.text)} ({n.count})" for n in r.notes) + "</li>" for r in trace.ranks)
    said = "".join(f"<li><strong>{escape(f.says)}</strong><br>Evidence: {escape(f.evidence)}"
                   f"<br>Next: {escape(f.do)}</li>" for f in findings)
    rows = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in table_rows(found))
    return _PAGE.format(
        title="Trace: " + escape(trace.timeline.provenance), sentence=escape(found.sentence),
        pictures=_image(lambda: figure(trace.timeline, step=typical_step(found))) +
        _image(lambda: review(trace.timeline, found=found if step is None else measure(trace))),
        head="".join(f"<th>{name}</th>" for name in COLUMNS), rows=rows, files=files,
        findings=said or "<li>Nothing stands out: no rule found evidence of a known cause.</li>")


def _image(draw: Callable[[], Picture]) -> str:
    try:
        picture = draw()
    except ValueError:
        return ""
    png = base64.b64encode(picture.png()).decode()
    return f'<img alt="{escape(picture.words, quote=True)}" src="data:image/png;base64,{png}">'
