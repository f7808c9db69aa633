"""`recall()`: every prediction that was ever answered in this folder, beside what was found."""

from __future__ import annotations

from html import escape

from course_lib.lab import store
from course_lib.lab.prediction import NAME, with_unit
from course_lib.lab.present import note, show

HEADS = ("lab", "question", "you predicted", "it was")


def recall() -> None:
    """Show the answers to `predict()` of all labs in order, beside what `compare()` showed. One that a lab asked and
    never compared has "not seen yet"; without any answer there is a sentence."""
    kept = {key: record for key, record in store.read(NAME).items() if "answer" in record}
    if not kept:
        note("You have saved no prediction in this folder yet. Each lab asks for some before it measures; the fields "
             "keep what you answer.")
        return
    rows = [(key.partition(".")[0], record["question"], with_unit(record["answer"], record["unit"]),
             with_unit(record["found"], record["unit"]) if "found" in record else "not seen yet")
            for key, record in sorted(kept.items(), key=lambda item: (int(item[0].partition(".")[0]), item[0]))]
    cell = "text-align:left;vertical-align:top;background:transparent;color:inherit;padding:.1em .8em .1em 0"
    head = "".join(f'<th scope="col" style="{cell}">{name}</th>' for name in HEADS)
    body = "".join("<tr>" + "".join(f'<td style="{cell}">{escape(value)}</td>' for value in row) + "</tr>"
                   for row in rows)
    text = "\n".join(f"{lab:>2}  {question}\n    you predicted {mine}; it was {found}"
                     for lab, question, mine, found in rows)
    show(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>", text)
