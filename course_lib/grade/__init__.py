"""The grader. It judges and never believes: a submission returns values, everything else is looked at from outside.

`template` takes the source of the exercise cells, `sandbox` is where that source runs, `referee` compares what it
returns, `measure` times it on ranks and counts its bytes, `engine` keeps an executed notebook as evidence for
people, `records` and `feedback` write down what came of it, and `batch` does this for a folder.
"""

from __future__ import annotations

import sys

# jsonschema, which nbformat loads, has an optional check of web addresses whose grammar takes seconds to build in
# every process. No notebook is judged by it.
sys.modules.setdefault("rfc3987_syntax", None)
