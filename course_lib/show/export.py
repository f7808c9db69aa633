"""One HTML file with live sliders that needs no network, no kernel and no server."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path

ESM = Path(__file__).with_name("widget.js")

# The page may run what is in it and fetch nothing: the browser enforces what "offline" promises.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
body {{ margin: 0 auto; max-width: 1400px; }}
img {{ max-width: 100%; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #111418; }} }}
</style>
</head>
<body>
<div id="widget"><noscript><img alt="{words}" src="data:image/png;base64,{png}"></noscript></div>
<script type="application/json" id="state">{state}</script>
<script type="module">
{esm}
const state = JSON.parse(document.getElementById("state").textContent), heard = {{}};
const model = {{
  get: (key) => state[key],
  set(key, value) {{
    const moved = state[key] !== value;
    state[key] = value;
    if (moved) (heard[`change:${{key}}`] ?? []).forEach((call) => call());
  }},
  on: (name, call) => (heard[name] ??= []).push(call),
  off: (name, call) => (heard[name] = (heard[name] ?? []).filter((each) => each !== call)),
  save_changes() {{}},
}};
render({{ model, el: document.getElementById("widget") }});
</script>
</body>
</html>
"""


def page(state: dict, *, title: str, words: str, png: bytes) -> str:
    """The page: `state` is what the widget's model holds, `png` and `words` stand in where scripts are off."""
    # "</script" would end the element, wherever it stands in a string.
    safe = json.dumps(state, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return _PAGE.format(title=html.escape(title), words=html.escape(words, quote=True),
                        png=base64.b64encode(png).decode(), state=safe, esm=ESM.read_text(encoding="utf-8"))
