"""`feedback/<id>.html`: what a learner gets to see. Names, rows and hints; never a hidden check or a solution."""

from __future__ import annotations

import base64
from html import escape

from course_lib.grade.outcome import Judgement, Part

WORDS = {
    "ok": "passed",
    "failed_checks": "not right yet",
    "stub_left": "not written yet",
    "timeout": "ran out of time",
    "kernel_died": "ended its process",
    "out_of_memory": "ran out of memory",
    "early_exit": "left early",
    "output_flood": "printed too much",
    "unreadable": "not a notebook",
    "template_mismatch": "not this lab's notebook",
    "timing_unstable": "could not be timed; a person will look",
    "impossible": "faster than possible; a person will look",
    "grader_error": "the grader failed; a person will look",
}

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .2em .8em .2em 0; }
th { font-weight: normal; } img { max-width: 100%; background: #fff; } .ok { color: #009E73; } .no { color: #D55E00; }
small { opacity: .8; }
"""


def page(judgement: Judgement, pictures: list[tuple[str, bytes]]) -> str:
    """A self-contained page. `pictures` are captions with PNG bytes, shown in this order."""
    points = "to be decided by a person" if judgement.points is None else f"{judgement.points:g}"
    head = f"Lab {judgement.lab}: {escape(judgement.id)}"
    body = [f"<h1>{head}</h1>", f"<p><strong>{points} of {judgement.max_points:g} points</strong>, "
            f"{escape(WORDS[judgement.status])}.</p>"]  # fmt: skip
    if judgement.note:
        body.append(f"<p>{escape(judgement.note)}</p>")
    body += [f"<p><small>Note: {escape(flag)}.</small></p>" for flag in judgement.flags]
    body += [_section(part) for part in judgement.parts]
    for caption, picture in pictures:
        data = base64.b64encode(picture).decode()
        body.append(f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
                    f"<figcaption>{escape(caption)}</figcaption></figure>")  # fmt: skip
    made = f"Sandbox: {escape(judgement.isolation)}. Judged in {judgement.seconds:.0f} s."
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{head}</title>'
            f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
            + "".join(body) + f"<p><small>{made}</small></p></body></html>")  # fmt: skip


def _section(part: Part) -> str:
    points = "?" if part.points is None else f"{part.points:g}"
    kind = "ok" if part.outcome == "ok" else "no"
    text = [f'<h2>{escape(part.id)} {escape(part.title)}: <span class="{kind}">{WORDS[part.outcome]}</span></h2>',
            f"<p>{points} of {part.max_points:g} points. {escape(part.sentence)}</p>"]  # fmt: skip
    if part.rows:
        rows = "".join(
            f'<tr><td class="{"ok" if row.ok else "no"}" aria-label="{"passed" if row.ok else "failed"}">'
            f"{'✔' if row.ok else '✘'}</td><th scope=row>{escape(row.name)}</th>"
            f"<td>{escape(row.expected)}</td><td>{escape(_short(row.seen))}</td></tr>"
            for row in part.rows)  # fmt: skip
        head = "<tr><td></td><td>check</td><td>expected</td><td>seen</td></tr>"
        text.append(f"<table>{head}{rows}</table>")
    if part.hint:
        text.append(f"<p><strong>What this looks like.</strong> {escape(part.hint)}</p>")
    return "".join(text)


def _short(text: str) -> str:
    return text if len(text) <= 400 else text[:399] + "…"
