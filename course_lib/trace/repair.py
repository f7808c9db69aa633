"""JSON that profilers wrote wrongly, made readable; every repair is counted.

Known faults: Windows paths with single backslashes, `inf`, `nan` and `N/A` as values, raw control characters,
trailing commas, unescaped quotes in names, and files that end in the middle.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import orjson

from course_lib.trace.note import Note

# Valid escapes are consumed whole, so that a good `\\` is never doubled; a lone surrogate is as bad as no escape.
_ESCAPE = re.compile(r'\\(?:(["\\/bfnrt]|u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}|'
                     r'[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))|)')
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[-+]?\b(?:inf(?:inity)?|nan)\b|\bN/A|,(?=\s*[\]}])', re.IGNORECASE | re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")
# An event opens after a `[` or `,`; an args object opens after a `:`.
_EVENT = re.compile(r'(?<=[\[,])\s*\{\s*"(?:ph|name|cat|pid|tid|ts|dur|id|args|s|bp)"\s*:')

_TEXTS = {
    "escapes": "invalid backslash escapes were taken as plain backslashes",
    "values": "values that are not JSON (inf, nan, N/A) were read as missing",
    "control": "raw control characters in names were read as spaces",
    "comma": "trailing commas were ignored",
    "lost-events": "events could not be read and are missing from every number",
    "truncated": "the file ends in the middle: whole events were kept, the step it was cut in is dropped",
    "encoding": "bytes that are not UTF-8 were replaced",
}


def repair(raw: bytes) -> tuple[Any, list[Note]]:
    """The document in `raw`, and what had to be done to read it. The document is None where nothing was found."""
    done: Counter[str] = Counter()
    text = raw.decode("utf-8", "replace").lstrip("\ufeff")
    done["encoding"] = text.count("\ufffd")
    fixed = _fix(text, done)
    try:
        found: Any = orjson.loads(fixed)
    except ValueError:
        done = Counter({"encoding": done["encoding"]})
        found = _salvage(text, done)
    return found, [Note(code, _TEXTS[code], count) for code, count in done.items() if count]


def _fix(text: str, done: Counter[str]) -> str:
    """The repairs that need no knowledge of events. Counts them in `done`."""
    def escape(match: re.Match[str]) -> str:
        if match.group(1) is not None:
            return match.group()
        done["escapes"] += 1
        return "\\\\"

    def token(match: re.Match[str]) -> str:
        word = match.group()
        if word[0] == '"':
            clean, count = _CONTROL.subn(" ", word)
            done["control"] += count
            return clean
        done["comma" if word == "," else "values"] += 1
        return "" if word == "," else "null"

    return _TOKEN.sub(token, _ESCAPE.sub(escape, text))


def _salvage(text: str, done: Counter[str]) -> dict[str, Any] | None:
    """Event by event: what can be read is kept, what cannot is counted."""
    begin = text.find('"traceEvents"')
    begin = text.find("[", max(begin, 0))
    starts = [m.end() - len(m.group().lstrip()) for m in _EVENT.finditer(text, max(begin, 0))]
    if begin < 0 or not starts:
        return None
    events, rest = [], ""
    for start, stop in zip(starts, [*starts[1:], len(text)]):
        event, rest = _event(text[start:stop], done)
        if event is None:
            done["lost-events"] += 1
        else:
            events.append(event)
    # Behind the last event of a whole file comes at least the closing bracket.
    done["truncated"] = int("]" not in rest)
    return {**_around(text[:begin], rest), "traceEvents": events}


def _event(piece: str, done: Counter[str]) -> tuple[dict[str, Any] | None, str]:
    """The event at the beginning of `piece` and the text behind it."""
    try:
        return orjson.loads(piece.rstrip(" \t\r\n,")), ""
    except ValueError:
        pass
    here: Counter[str] = Counter()
    fixed = _fix(piece, here)
    try:
        event, end = json.JSONDecoder(strict=False).raw_decode(fixed)
    except (ValueError, RecursionError):
        return None, ""
    done.update(here)
    return event, fixed[end:]


def _around(head: str, tail: str) -> dict[str, Any]:
    """What stands before and behind the events: rank, base time, devices."""
    found: dict[str, Any] = {}
    for text in (re.sub(r',?\s*"traceEvents"\s*:\s*$', "}", head), "{" + tail.lstrip(" \t\r\n],")):
        try:
            part = json.loads(_fix(text, Counter()))
        except (ValueError, RecursionError):
            continue
        found |= part if isinstance(part, dict) else {}
    return found
